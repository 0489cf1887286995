"""`dspark calibrate`: what the drafter's confidence is worth, measured and mended (paper section 3.2.1).

Answers prompts with every draft verified, once for each way of sampling, and fits a temperature for each
position, and a shift. The tables are kept beside the draft model, where `dspark serve` finds them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scheduler.calibration import CALIBRATION_FILE
from server.evaluate import UNTRIMMED
from server.options import SettingsError, add_flags, load

_OWN = ("prompts", "data", "rounds", "max_tokens", "max_prompt", "output", "png")

#: how each regime samples
REGIMES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "rejection": {"temperature": 1.0},
    "coupled": {"temperature": 1.0, "seed": 0},
}


def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    from drafters.evaluation.plots import can_plot
    from engine.outputs import NullObserver
    from server.wiring import BadSettings, build_parts

    options = vars(_parser().parse_args(argv))
    own = {name: options.pop(name) for name in _OWN}
    try:
        if load(options).policy is not None:
            raise ValueError(
                "rounds that a policy trims hide what would have happened: leave --verify-policy out"
            )
        if not (own["prompts"] or own["data"]):
            raise ValueError("say which prompts: --prompts or --data")
        # The whole block will be verified, once its size is known, and never less of it for want of rows.
        settings = load({**options, "verify_policy": "fixed:1", "max_num_batched_tokens": UNTRIMMED})
        if own["png"] and not can_plot():
            raise ValueError("--png needs matplotlib: pip install matplotlib")
        parts = build_parts(settings, NullObserver(), lambda line: print(line, file=sys.stderr))
        tables, rounds = _calibrate(parts, own)
        _save(tables, Path(own["output"] or _beside(parts)))
    except (SettingsError, BadSettings, OSError, ValueError) as error:
        print(f"dspark calibrate: {error}", file=sys.stderr)
        return 1
    if own["png"]:
        from drafters.evaluation.plots import reliability_diagram

        reliability_diagram(rounds, Path(own["png"]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dspark calibrate",
        usage="dspark calibrate (--prompts FILE | --data DIR) [MODEL] [options]",
        description="Fit the drafter's confidence to what is accepted, every draft verified.",
        allow_abbrev=False,
    )
    group = parser.add_argument_group("Calibration")
    group.add_argument(
        "--prompts",
        nargs="+",
        metavar="FILE",
        help='held-out prompts, one {"prompt": ...} a line',
    )
    group.add_argument(
        "--data", metavar="DIR", help="instead: those of train_mix_*.jsonl there that smollm2-answers/ lacks"
    )
    group.add_argument("--rounds", type=int, default=10_000, metavar="N", help="for each way of sampling")
    group.add_argument("--max-tokens", type=int, default=128, metavar="N", help="tokens an answer")
    group.add_argument("--max-prompt", type=int, default=384, metavar="N", help="longer prompts are left out")
    group.add_argument("--output", metavar="FILE", help=f"default: {CALIBRATION_FILE} beside the draft model")
    group.add_argument("--png", metavar="FILE", help="draw reliability before and after")
    add_flags(parser)
    return parser


def _calibrate(parts: Any, own: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """(a table a regime, what they were fitted to and what was held back)."""
    from drafters.evaluation.rounds import Recorder
    from scheduler.calibration import fit
    from scheduler.policy import Fixed

    drafter = parts.worker.drafter
    gamma = getattr(drafter, "gamma", 0)
    if not gamma:
        raise ValueError("there is no draft model, so there is no confidence to calibrate")
    model = getattr(drafter, "model", drafter) if drafter.name == "hybrid" else drafter
    recorder = parts.worker.drafter = Recorder(model)
    parts.loop.speculation.policy = Fixed(gamma)
    tables, seen = [], {}
    for name, how in REGIMES.items():
        recorder.rounds = []
        _answer(parts, recorder, _prompts(parts, own), how, own)
        # A round that an accepted token ended does not tell what would have become of the rest.
        whole = [
            each
            for each in recorder.rounds
            if each.confidence and each.verified == gamma and each.emitted > each.accepted
        ]
        if not whole:
            raise ValueError(f"{model.name} drafts without confidence: nothing to calibrate")
        logits = np.array([each.confidence for each in whole])
        accepted = np.array([each.accepted for each in whole])
        # Every other round is held back, to say what the table is worth on rounds that it has not seen.
        held_out = logits[1::2], accepted[1::2]
        table = fit(name, logits[::2], accepted[::2], held_out)  # type: ignore[arg-type]
        seen[name] = (table, *held_out)
        tables.append(table)
        _show(name, len(whole), table)
    return tables, seen


def _show(name: str, rounds: int, table: Any) -> None:
    print(f"{name}: {rounds} rounds; ECE of survival as it came, with temperatures, with shifts; noise")
    columns = (table.temperatures, table.shifts, table.ece_before, table.ece_temperatures, table.ece_after)
    for k, row in enumerate(zip(*columns, table.ece_noise, strict=True), 1):
        heat, shift, *errors = row
        text = " ".join(f"{error:.4f}" for error in errors)
        print(f"    position {k}: temperature {heat:.2f}, shift {shift:+.2f}, {text}", flush=True)


def _prompts(parts: Any, own: dict[str, Any]) -> Iterator[list[int]]:
    """Token ids of the prompts that are short enough, in a random order."""
    if own["data"]:
        entries = _unanswered(Path(own["data"]))
    else:
        entries = [entry for file in own["prompts"] for entry in _lines(Path(file))]
    if not entries:
        raise ValueError("there are no prompts: --data looks for train_mix_*.jsonl")
    for index in np.random.default_rng(0).permutation(len(entries)):
        prompt = entries[index]["prompt"]
        text = prompt if isinstance(prompt, str) else prompt[0]
        ids = list(parts.tokenizer.apply_chat_template([{"role": "user", "content": text}]))
        if len(ids) <= own["max_prompt"]:
            yield ids


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def _unanswered(data: Path) -> list[dict[str, Any]]:
    """Training prompts that no draft model was trained on, since they have no answer."""
    answered: set[str] = set()
    for file in (data / "smollm2-answers").glob("*.npz"):
        with np.load(file) as answers:
            answered.update(answers["id"].tolist())
    return [
        entry
        for file in sorted(data.glob("train_mix_*.jsonl"))
        for entry in _lines(file)
        if entry["id"] not in answered
    ]


def _answer(
    parts: Any, recorder: Any, prompts: Iterator[list[int]], how: dict[str, Any], own: dict[str, Any]
) -> None:
    """Until there are rounds enough, or no prompts left."""
    from engine.params import SamplingParams
    from engine.request import Request

    waiting = enumerate(prompts)
    while len(recorder.rounds) < own["rounds"]:
        while len(parts.loop.requests) < parts.loop.limits.max_sequences:
            number, ids = next(waiting, (None, None))
            if ids is None:
                break
            seed = {"seed": number} if "seed" in how else {}
            params = SamplingParams(max_tokens=own["max_tokens"], **{**how, **seed})
            parts.loop.add(Request(f"calibrate-{number}", ids, params))
        batch = parts.loop.begin()
        if batch is None:
            break
        parts.loop.commit(batch, parts.worker.run(batch))
    for name in list(parts.loop.requests):
        parts.loop.abort(name)
    parts.loop.drain_aborted()


def _beside(parts: Any) -> Path:
    folder = parts.draft_folder
    if folder is None:
        raise ValueError("say where the tables go: --output")
    return Path(folder) / CALIBRATION_FILE


def _save(tables: list[Any], file: Path) -> None:
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    text = json.dumps([table.to_dict() for table in tables], indent=1) + "\n"
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)
    print(f"wrote {file}")
