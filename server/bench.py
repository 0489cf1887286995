"""`dspark bench`: the engine without HTTP, in a closed loop of so many streams.

For each combination of concurrency, sampling and policy: output tokens per second, step time, what share of
the time is spent outside the target's forward pass, and how speculation fares. Combinations run one after
another in one process, so that their ratios can be trusted more than their absolute values.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

from server.bench_prompts import PROMPTS
from server.options import SettingsError, add_flags, load
from server.trace import chrome_trace, waits

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 1.0},
    "top-p": {"temperature": 1.0, "top_p": 0.9},
    "seeded": {"temperature": 1.0, "seed": 1},
}


@dataclass
class _Tally:
    """An observer that keeps what a benchmark needs."""

    steps: list[Any] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def step(self, stats: Any) -> None:
        self.steps.append(stats)

    def first_token(self, seconds: float) -> None:
        self.first.append(seconds)

    def inter_token(self, seconds: float, tokens: int) -> None:
        self.gaps += [seconds / tokens] * tokens

    def finished(self, stats: Any) -> None: ...
    def preempted(self) -> None: ...
    def prefix_cache(self, queried_tokens: int, hit_tokens: int) -> None: ...

    def clear(self) -> None:
        self.steps.clear()
        self.first.clear()
        self.gaps.clear()


def main(argv: Sequence[str]) -> int:
    """Entry point of `dspark bench`; returns the exit code."""
    options = vars(_parser().parse_args(argv))
    own = {name: options.pop(name) for name in _OWN}
    try:
        settings = load(options)
        prompts = _prompts(own["prompts"])
    except (SettingsError, OSError, ValueError) as error:
        print(f"dspark bench: {error}", file=sys.stderr)
        return 2
    from server.wiring import BadSettings, build_parts

    tally = _Tally()
    try:
        parts = build_parts(settings, tally, lambda line: print(line, file=sys.stderr))
    except (BadSettings, OSError, ValueError) as error:
        print(f"dspark bench: {error}", file=sys.stderr)
        return 1
    policies = own["policies"] or dict.fromkeys(("off", parts.info["verify_policy"]))
    rows, steps = asyncio.run(_measure(parts, tally, prompts, own, list(policies)))
    result = {"engine": parts.info, "max_tokens": own["max_tokens"], "rows": rows}
    if own["json"]:
        Path(own["json"]).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if own["trace"]:
        Path(own["trace"]).write_text(json.dumps(chrome_trace(steps)), encoding="utf-8")
    return 0


_OWN = (
    "concurrency",
    "sampling",
    "policies",
    "requests",
    "max_tokens",
    "prompts",
    "prompt_tokens",
    "json",
    "trace",
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dspark bench",
        usage="dspark bench [MODEL] [options]",
        description="Measure the engine without HTTP, in a closed loop of so many streams.",
        allow_abbrev=False,
    )
    group = parser.add_argument_group("Benchmark")
    group.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16], metavar="N", help="streams")
    group.add_argument(
        "--sampling", nargs="+", choices=SAMPLINGS, default=["greedy"], help="how tokens are chosen"
    )
    group.add_argument(
        "--policies",
        nargs="+",
        metavar="P",
        help="verify policies to compare (default: off and the configured)",
    )
    group.add_argument(
        "--requests", type=int, default=2, metavar="N", help="requests a stream, after one to warm up"
    )
    group.add_argument("--max-tokens", type=int, default=64, metavar="N", help="tokens a request")
    group.add_argument("--prompts", metavar="FILE.jsonl", help='prompts to use, one {"prompt": ...} a line')
    group.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="cut or repeat each prompt to so many tokens"
    )
    group.add_argument("--json", metavar="FILE", help="write the results there as well")
    group.add_argument("--trace", metavar="FILE", help="write the steps there, for chrome://tracing")
    add_flags(parser)
    return parser


def _prompts(path: str | None) -> list[str]:
    if path is None:
        return list(PROMPTS)
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines if line.strip()]
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


async def _measure(
    parts: Any, tally: _Tally, prompts: list[str], own: dict[str, Any], policies: list[str]
) -> tuple[list[dict[str, Any]], list[Any]]:
    """(a row a combination, the steps of all of them)"""
    from engine.async_engine import AsyncEngine
    from scheduler.policies import parse_policy
    from scheduler.policy import Fixed

    if own["concurrency"] and max(own["concurrency"]) > parts.loop.limits.max_sequences:
        print("dspark bench: some concurrencies exceed --max-num-seqs and will queue", file=sys.stderr)
    engine = AsyncEngine(parts.loop, parts.worker, parts.tokenizer, max_queued=1 << 20)
    await engine.start()
    ids = [_sized(_encode(parts.tokenizer, prompt), own["prompt_tokens"]) for prompt in prompts]
    print(_HEADER)
    rows = []
    if any(not isinstance(parse_policy(policy), Fixed) for policy in policies):
        parts.loop.speculation.throughput = parts.profile(False)
    drafter, traced = parts.worker.drafter, []
    for sampling, streams, policy in itertools.product(own["sampling"], own["concurrency"], policies):
        chosen = parts.loop.speculation.policy = parse_policy(policy)
        parts.worker.drafter = None if chosen.slots() == 0 else drafter  # off is without, as when serving
        row: dict[str, Any] = {
            "sampling": sampling,
            "concurrency": streams,
            "policy": parts.loop.speculation.policy.name,
        }
        row |= await _run(engine, tally, ids, SAMPLINGS[sampling], streams, own)
        rows.append(row)
        traced += tally.steps
        print(_FORMAT.format(**row), flush=True)
    await engine.drain(0.0)
    return rows, traced


def _encode(tokenizer: Any, prompt: str) -> list[int]:
    if tokenizer.has_chat_template:
        return list(tokenizer.apply_chat_template([{"role": "user", "content": prompt}]))
    return list(tokenizer.encode(prompt))


def _sized(ids: list[int], count: int | None) -> list[int]:
    return ids if count is None else (ids * -(-count // len(ids)))[:count]


async def _run(
    engine: Any,
    tally: _Tally,
    prompts: list[list[int]],
    sampling: dict[str, Any],
    streams: int,
    own: dict[str, Any],
) -> dict[str, Any]:
    """One combination: every stream sends its requests one after another; the first of each warms up."""
    from engine.params import SamplingParams
    from engine.request import Request

    numbers = itertools.count()
    params = SamplingParams(max_tokens=own["max_tokens"], ignore_eos=True, **sampling)

    async def send(index: int) -> int:
        name = f"bench-{next(numbers)}"
        # A salt of its own: every request prefills its whole prompt.
        request = Request(name, prompts[index % len(prompts)], params, f"{time.perf_counter_ns()}-{name}")
        async with engine.submit(request) as stream:
            async for _ in stream:
                pass
        return int(stream.usage.completion_tokens)

    async def stream_of_requests(index: int, count: int) -> int:
        return sum([await send(index + streams * turn) for turn in range(count)])

    await asyncio.gather(*(stream_of_requests(index, 1) for index in range(streams)))
    tally.clear()
    begun = time.perf_counter()
    counts = await asyncio.gather(
        *(stream_of_requests(index + streams, own["requests"]) for index in range(streams))
    )
    wall = time.perf_counter() - begun
    steps = list(tally.steps)
    verified = [length for step in steps for length in step.verified]
    accepted = [length for step in steps for length in step.accepted]
    wait, lost = waits(steps)
    return {
        "tokens_per_second": sum(counts) / wall,
        "step_ms": 1e3 * median(step.step_time for step in steps),
        "rows_per_step": mean(step.rows for step in steps),
        "outside_forward": 1.0 - sum(step.forward_time for step in steps) / wall,
        "draft_share": sum(step.draft_time for step in steps) / wall,
        "verify_length": mean(verified) if verified else 0.0,
        "accepted_length": 1.0 + mean(accepted) if accepted else 1.0,
        "ttft_ms": 1e3 * median(tally.first),
        "itl_ms": 1e3 * mean(tally.gaps) if tally.gaps else 0.0,
        "wall_seconds": wall,
        "tokens": sum(counts),
        "steps": len(steps),
        "wait_ms": 1e3 * wait,
        "lost_ms": 1e3 * lost,
        "forecast_error": _forecast_error(steps),
    }


def _forecast_error(steps: list[Any]) -> float | None:
    """Median over steps of how far their duration was from what was foreseen, relative to that."""
    off = [abs(step.step_time / step.forecast_time - 1.0) for step in steps if step.forecast_time]
    return median(off) if off else None


_HEADER = (
    "sampling     streams  policy    tokens/s  step ms  rows/step  outside fwd  verify  tau   TTFT ms  ITL ms"
)
_FORMAT = (
    "{sampling:<12} {concurrency:>7}  {policy:<8} {tokens_per_second:>9.1f} {step_ms:>8.1f} "
    "{rows_per_step:>10.1f} {outside_forward:>12.1%} {verify_length:>7.2f} {accepted_length:>5.2f} "
    "{ttft_ms:>8.0f} {itl_ms:>7.1f}"
)
