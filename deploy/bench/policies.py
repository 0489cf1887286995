"""Verify policies against each other at many loads: one process, short waves in turn, ratios wave by wave.

    .venv/bin/python -m deploy.bench.policies --data DIR [--rounds N] [--points T:STREAMS ...]

A round takes new prompts (math, code, chat), computes them once, and answers them under every policy in
random order: so many streams in a closed loop, until so many tokens are out. Ratios are taken within a round.
`off` runs without a drafter, as it does when serving. Then look-ahead and off once more with prompts that
nothing has computed, for the time to the first token. Appends waves to results/policies.csv and writes
results/policies.json and .png; a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from deploy.bench.policy_report import FIELDS, report
from engine.outputs import NullObserver
from engine.params import SamplingParams
from engine.request import Request
from scheduler.policies import parse_policy
from server.settings import Settings
from server.wiring import Parts, build_parts

RESULTS = Path(__file__).parents[2] / "results"
POLICIES = (
    "off", "fixed:1", "fixed:2", "fixed:3", "fixed:5", "fixed:7",
    "threshold", "algorithm1", "lagged", "lookahead",
)  # fmt: skip
POINTS = ("0:1", "0:2", "0:4", "0:8", "0:16", "0:32", "1:1", "1:4", "1:16")
BENCHMARKS = ("gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "alpaca500")
_LONGEST_PROMPT = 300
_STREAMS = 4  # with fewer, a wave is longer, or it would be over at once


class Steps(NullObserver):
    """Keeps what a wave needs."""

    def __init__(self) -> None:
        self.steps: list[Any] = []
        self.first: list[float] = []

    def step(self, stats: Any) -> None:
        self.steps.append(stats)

    def first_token(self, seconds: float) -> None:
        self.first.append(seconds)


@dataclass
class Bench:
    parts: Parts
    seen: Steps
    tokens: int
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.drafter = self.parts.worker.drafter
        self.parts.loop.speculation.throughput = self.parts.profile(False)

    def use(self, policy: str) -> None:
        chosen = self.parts.loop.speculation.policy = parse_policy(policy)
        self.parts.worker.drafter = None if chosen.slots() == 0 else self.drafter

    def compute(self, prompts: list[list[int]], salt: str) -> None:
        """Put prompts into the prefix cache."""
        for prompt in prompts:
            self._add(prompt, SamplingParams(max_tokens=1), salt)
        while self._step():
            pass

    def wave(self, prompts: list[list[int]], streams: int, heat: float, salt: str) -> dict[str, float]:
        """Streams in a closed loop until so many tokens a stream are out."""
        length = self.tokens * max(1, _STREAMS // streams)
        params = SamplingParams(temperature=heat, max_tokens=length)
        waiting = itertools.cycle(prompts)
        self.seen.steps.clear()
        self.seen.first.clear()
        begun, out = time.perf_counter(), 0
        while out < length * streams:
            while len(self.parts.loop.requests) < streams:
                self._add(next(waiting), params, salt)
            self._step()
            out += self.seen.steps[-1].emitted
        seconds = time.perf_counter() - begun
        for name in list(self.parts.loop.requests):
            self.parts.loop.abort(name)
        self.parts.loop.drain_aborted()
        steps = self.seen.steps
        lengths = [length for step in steps for length in step.verified]
        foreseen = [step for step in steps if step.forecast_time]
        return {
            "seconds": seconds,
            "tokens": out,
            "tokens_per_second": out / seconds,
            "ttft": mean(self.seen.first),
            "verify_length": mean(lengths),
            "slots": mean(slots for step in steps for slots in step.slots),
            "tau": 1.0 + mean(length for step in steps for length in step.accepted),
            "step_error": float(
                np.median([abs(s.step_time / s.forecast_time - 1.0) for s in foreseen] or [0])
            ),
            "forecast_tokens_per_second": sum(s.forecast_tokens for s in foreseen)
            / max(1e-9, sum(s.forecast_time for s in foreseen)),
            "measured_tokens_per_second": sum(s.decided for s in foreseen)
            / max(1e-9, sum(s.step_time for s in foreseen)),
        }

    def _add(self, prompt: list[int], params: SamplingParams, salt: str) -> None:
        self.parts.loop.add(Request(f"wave-{next(self.numbers)}", prompt, params, salt))

    def _step(self) -> bool:
        batch = self.parts.loop.begin()
        if batch is None:
            return False
        self.parts.loop.commit(batch, self.parts.worker.run(batch))
        return True


def main() -> int:
    options = _parser().parse_args()
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / "policies.csv"
    rows = _read(file)
    done = {(row["round"], row["point"]) for row in rows}
    seen = Steps()
    parts = build_parts(Settings(threads=options.threads), seen, lambda line: print(line, flush=True))
    bench = Bench(parts, seen, options.tokens)
    prompts = _prompts(parts.tokenizer, Path(options.data))
    with file.open("a", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, FIELDS)
        if not rows:
            writer.writeheader()
        for number, point in itertools.product(range(options.rounds), options.points):
            if (number, point) in done:
                continue
            done_rows = list(_round(bench, prompts, number, point, options.policies))  # all of it or nothing
            rows += done_rows
            writer.writerows(done_rows)
            out.flush()
            of = [row for row in rows if row["round"] == number and row["point"] == point]
            best = max(of, key=lambda row: row["tokens_per_second"])
            speed = f"{best['tokens_per_second']:.0f} tokens/s"
            print(f"round {number}, {point}: {best['policy']} {speed}", flush=True)
    print(report(rows, parts.info, RESULTS))
    return 0


def _round(
    bench: Bench, prompts: list[list[int]], number: int, point: str, policies: list[str]
) -> Iterator[dict[str, Any]]:
    heat, streams = float(point.partition(":")[0]), int(point.partition(":")[2])
    rng = np.random.default_rng([number, streams, int(heat)])
    mine = [prompts[i] for i in rng.permutation(len(prompts))[: 2 * max(streams, _STREAMS)]]
    name = f"{point}-{number}-{time.perf_counter_ns()}"
    for salt, policy in (("off", "off"), ("on", "fixed:1")):
        bench.use(policy)
        bench.compute(mine, f"{name}-{salt}")
    runs = [(policy, "computed") for policy in rng.permutation(policies).tolist()]
    runs += [(policy, "new") for policy in rng.permutation(["off", "lookahead"]).tolist()]
    for policy, kind in runs:
        bench.use(policy)
        salt = f"{name}-{policy}-new" if kind == "new" else f"{name}-{'off' if policy == 'off' else 'on'}"
        figures = bench.wave(mine, streams, heat, salt)
        yield {"round": number, "point": point, "policy": policy, "prompts": kind, **figures}


def _read(file: Path) -> list[dict[str, Any]]:
    if not file.exists():
        return []
    with file.open(encoding="utf-8") as lines:
        texts = ("point", "policy", "prompts")
        return [
            {key: _parsed(value) if key not in texts else value for key, value in row.items()}
            for row in csv.DictReader(lines)
        ]


def _parsed(value: str) -> float:
    return int(value) if value.isdecimal() else float(value)


def _prompts(tokenizer: Any, data: Path) -> list[list[int]]:
    out = []
    for name in BENCHMARKS:
        lines = (data / f"eval_{name}.jsonl").read_text(encoding="utf-8").splitlines()[:80]
        for line in lines:
            entry = json.loads(line)["prompt"]
            text = entry if isinstance(entry, str) else entry[0]
            ids = list(tokenizer.apply_chat_template([{"role": "user", "content": text}]))
            if len(ids) <= _LONGEST_PROMPT:
                out.append(ids)
    return out


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, metavar="DIR", help="with eval_*.jsonl")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=48, help="a stream and wave")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--points", nargs="+", default=list(POINTS), metavar="TEMPERATURE:STREAMS")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
