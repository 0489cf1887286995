"""`dspark eval`: accepted length by benchmark, conditional acceptance by position, trust in the confidence.

The paper's protocol: fixed block, no scheduling, temperature 1 and 0, no filters, the first turn of each
prompt (section 4.1). Rounds are pooled over the prompts of a benchmark; the macro average is over
benchmarks. ms/token is (T_draft + T_verify) / tau over all sequences of a step: with --max-num-seqs 1 it is
the paper's eq. 1.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from server.options import SettingsError, add_flags, load

_OWN = ("data", "benchmarks", "limit", "max_tokens", "temperatures", "json", "png", "max_prompt")

#: rows a step, so many that prefill never takes them from drafts
UNTRIMMED = 8192


def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    from drafters.evaluation.plots import can_plot, evaluation
    from engine.outputs import NullObserver
    from scheduler.policy import Fixed
    from server.wiring import BadSettings, build_parts

    options = vars(_parser().parse_args(argv))
    own = {name: options.pop(name) for name in _OWN}
    if own["png"] and not can_plot():
        print("dspark eval: --png needs matplotlib: pip install matplotlib", file=sys.stderr)
        return 1
    try:
        asked = load(options).policy
        fixed = asked or "fixed:1"  # or the whole block, below
        if not fixed.startswith("fixed:"):
            raise ValueError(
                f"blocks are verified in full, or fixed:K of them; --verify-policy {fixed} trims"
            )
        settings = load({**options, "verify_policy": fixed, "max_num_batched_tokens": UNTRIMMED})
        files = _files(own["data"], own["benchmarks"])
        parts = build_parts(settings, NullObserver(), lambda line: print(line, file=sys.stderr))
    except (SettingsError, BadSettings, OSError, ValueError) as error:
        print(f"dspark eval: {error}", file=sys.stderr)
        return 1
    if parts.worker.drafter is None:
        print("dspark eval: there is no drafter to evaluate", file=sys.stderr)
        return 1
    if asked is None:
        speculation = parts.loop.speculation
        most = settings.speculative_config.num_speculative_tokens
        speculation.policy = Fixed(most or speculation.gamma or speculation.lookup)
    result = {"engine": parts.info, "max_tokens": own["max_tokens"], "rows": _evaluate(parts, files, own)}
    if own["json"]:
        Path(own["json"]).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if own["png"]:
        evaluation({parts.info["drafter"]: result["rows"]}, Path(own["png"]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dspark eval",
        usage="dspark eval [MODEL] --data DIR [options]",
        description="Judge a drafter on benchmark prompts, the verify length fixed.",
        allow_abbrev=False,
    )
    group = parser.add_argument_group("Evaluation")
    group.add_argument(
        "--data",
        default=os.environ.get("DSPARK_DATA"),
        metavar="DIR",
        help="folder with eval_*.jsonl (default: DSPARK_DATA)",
    )
    group.add_argument("--benchmarks", nargs="+", metavar="NAME", help="some of them (default: all)")
    group.add_argument("--limit", type=int, default=20, metavar="N", help="prompts a benchmark")
    group.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens an answer")
    group.add_argument(
        "--max-prompt", type=int, default=1024, metavar="N", help="longer prompts are left out"
    )
    group.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.0], metavar="T")
    group.add_argument("--json", metavar="FILE", help="write the results there as well")
    group.add_argument("--png", metavar="FILE", help="draw them there as well (needs matplotlib)")
    add_flags(parser)
    return parser


def _files(data: str | None, wanted: list[str] | None) -> dict[str, Path]:
    if data is None:
        raise ValueError("say where the benchmarks are: --data or DSPARK_DATA")
    files = {path.stem.removeprefix("eval_"): path for path in sorted(Path(data).glob("eval_*.jsonl"))}
    if not files:
        raise ValueError(f"{data} holds no eval_*.jsonl")
    unknown = set(wanted or ()) - set(files)
    if unknown:
        raise ValueError(f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(files)}")
    return {name: path for name, path in files.items() if not wanted or name in wanted}


def _evaluate(parts: Any, files: dict[str, Path], own: dict[str, Any]) -> list[dict[str, Any]]:
    from drafters.evaluation.rounds import Recorder, accepted_length, conditional_acceptance, reliability

    recorder = parts.worker.drafter = Recorder(parts.worker.drafter)
    rows = []
    title = "conditional acceptance by position"
    print(f"{'benchmark':<16} {'T':>4} {'rounds':>7} {'tau':>6} {'ms/token':>8}  {title}")
    for heat in own["temperatures"]:
        pooled = []
        for name, file in files.items():
            recorder.rounds = []
            cost = _run(parts, _prompts(parts, file, own), heat, own["max_tokens"])
            rounds = recorder.rounds
            pooled += rounds
            row = {
                "benchmark": name,
                "temperature": heat,
                "rounds": len(rounds),
                "tau": accepted_length(rounds),
                "ms_per_token": cost,
                "conditional": conditional_acceptance(rounds),
            }
            rows.append(row)
            _show(row)
        measured = [row for row in rows if row["temperature"] == heat and row["rounds"]]
        taus, costs = [row["tau"] for row in measured], [row["ms_per_token"] for row in measured]
        mean = {
            "benchmark": "macro average",
            "temperature": heat,
            "rounds": len(pooled),
            "tau": sum(taus) / max(1, len(taus)),
            "ms_per_token": sum(costs) / max(1, len(costs)),
            "conditional": conditional_acceptance(pooled),
            "reliability": [
                {"ece": each.ece, "auc": each.auc, "bins": each.bins} for each in reliability(pooled)
            ],
        }
        rows.append(mean)
        _show(mean)
        for k, each in enumerate(reliability(pooled), 1):
            print(f"    survival of {k}: ECE {each.ece:.3f}, AUC {each.auc:.3f}")
    return rows


def _show(row: dict[str, Any]) -> None:
    chances = " ".join(f"{chance:.2f}" for chance in row["conditional"])
    print(
        f"{row['benchmark']:<16} {row['temperature']:>4.1f} {row['rounds']:>7} {row['tau']:>6.3f} "
        f"{row['ms_per_token']:>8.2f}  {chances}",
        flush=True,
    )


def _prompts(parts: Any, file: Path, own: dict[str, Any]) -> list[list[int]]:
    """Token ids of the first prompts that are short enough."""
    out: list[list[int]] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        entry = json.loads(line)
        text = entry["prompt"] if isinstance(entry["prompt"], str) else entry["prompt"][0]
        ids = list(parts.tokenizer.apply_chat_template([{"role": "user", "content": text}]))
        if len(ids) <= own["max_prompt"]:
            out.append(ids)
        if len(out) == own["limit"]:
            break
    return out


def _run(parts: Any, prompts: list[list[int]], heat: float, max_tokens: int) -> float:
    """Answer all prompts; milliseconds of drafting and verification a token, (T_draft + T_verify) / tau."""
    from engine.params import SamplingParams
    from engine.request import Request

    params = SamplingParams(max_tokens=max_tokens, temperature=heat)
    for index, ids in enumerate(prompts):
        parts.loop.add(Request(f"eval-{index}", ids, params, f"eval-{heat}"))
    busy, tokens = 0.0, 0
    while parts.loop.has_work:
        batch = parts.loop.begin()
        if batch is not None:
            result = parts.worker.run(batch)
            parts.loop.commit(batch, result)
            if all(item.sample and item.count - item.verify == 1 for item in batch.items):  # no prefill
                busy += result.forward_time + result.draft_time
                tokens += sum(len(verdict.tokens) for verdict in result.verdicts)
    return 1e3 * busy / max(1, tokens)
