"""Driving the server's engine from a script: texts step by step, or streams in a closed loop for a while."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from engine.async_engine import AsyncEngine
from engine.batch import DraftBlock, Verdict, VerificationBatch
from engine.drafter import Drafter, DraftRequest
from engine.outputs import NullObserver, StepStats, TokenLogprob
from engine.params import SamplingParams
from engine.request import Request
from scheduler.policies import parse_policy
from server.trace import waits, worker_end
from server.wiring import Parts

_names = itertools.count()
_LEAST_STEPS = 8  # in a stretch that says anything


class Steps(NullObserver):
    """Keeps all steps."""

    def __init__(self) -> None:
        self.steps: list[StepStats] = []

    def step(self, stats: StepStats) -> None:
        self.steps.append(stats)


@dataclass
class Text:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None


class NoDrafts:
    """In a drafter's place while nothing is drafted. It asks for the same features: the same graphs run."""

    name, identity = "none", ""

    def __init__(self, drafter: Drafter) -> None:
        self.feature_layers = drafter.feature_layers

    def observe(self, batch: VerificationBatch, features: Any, verdicts: Sequence[Verdict]) -> None:
        pass

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftBlock | None]:
        return [None] * len(requests)


class Driver:
    """Parts of an engine, and which policy it runs with; with `off` no drafter is at work."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.drafter = parts, parts.worker.drafter

    def use(self, policy: str) -> None:
        chosen = self.parts.loop.speculation.policy = parse_policy(policy)
        drafter = self.drafter
        if drafter is not None and chosen.slots() == 0:
            drafter = NoDrafts(drafter)
        self.parts.worker.drafter = drafter

    def add(self, prompt: Sequence[int], params: SamplingParams) -> str:
        """Queue a request that shares no cached page with any other; returns its name."""
        name = f"check-{next(_names)}"
        self.parts.loop.add(Request(name, prompt, params, name))
        return name

    def step(self, texts: dict[str, Text]) -> bool:
        """One step, its output put into `texts`; False if there was nothing to do."""
        batch = self.parts.loop.begin()
        if batch is None:
            return False
        for active, delta in self.parts.loop.commit(batch, self.parts.worker.run(batch)):
            text = texts.setdefault(active.request.request_id, Text())
            text.tokens += delta.token_ids
            text.logprobs += delta.logprobs
            text.finish = delta.finish_reason
        return True

    def answers(
        self, asked: Sequence[tuple[Sequence[int], SamplingParams]], at_once: int | None = None
    ) -> list[Text]:
        """Texts of all requests, in their order, at most so many of them side by side."""
        texts: dict[str, Text] = {}
        names = []
        for first in range(0, len(asked), at_once or len(asked)):
            names += [self.add(*each) for each in asked[first : first + (at_once or len(asked))]]
            while self.parts.loop.has_work:
                self.step(texts)
        return [texts[name] for name in names]


def prompts_of(parts: Parts, count: int, longest: int) -> list[list[int]]:
    """Random token ids, the same every time: what is checked with them does not depend on sense."""
    rng = np.random.default_rng(0)
    return [
        rng.integers(3, parts.loop.intake.vocab_size, size).tolist()
        for size in rng.integers(2, longest, count)
    ]


async def stream(
    engine: AsyncEngine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    streams: int,
    seconds: float,
    seen: Steps,
) -> dict[str, float]:
    """A closed loop of so many streams through the server's engine, for so long after all have begun."""

    async def one(index: int) -> None:
        for turn in itertools.count():
            name = f"check-{next(_names)}"
            prompt = prompts[(index + turn * streams) % len(prompts)]
            async with engine.submit(Request(name, prompt, params, name)) as output:
                async for _ in output:
                    started.add(index)

    started: set[int] = set()
    tasks = [asyncio.create_task(one(index)) for index in range(streams)]
    try:
        while len(started) < streams:  # everybody's prompt is computed
            await asyncio.sleep(0.01)
            _raise_failed(tasks)
        seen.steps.clear()
        begun = time.perf_counter()
        await asyncio.sleep(seconds)
        while len(seen.steps) < _LEAST_STEPS:  # on a slow machine
            await asyncio.sleep(0.01)
            _raise_failed(tasks)
        wall, steps = time.perf_counter() - begun, list(seen.steps)
        _raise_failed(tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while engine.gauges().running or engine.gauges().waiting:  # noqa: ASYNC110  (nothing signals it)
            await asyncio.sleep(0.01)
    return figures(steps, wall)


def _raise_failed(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done():
            task.result()


def figures(steps: Sequence[StepStats], wall: float) -> dict[str, float]:
    """What a stretch of steps did: speed, how long one took, what share of the time the worker waited."""
    if len(steps) < 2:
        raise ValueError("too few steps were run to say anything")
    busy = sum(worker_end(step) - step.worker_begun for step in steps)
    wait, lost = waits(steps)
    times = sorted(step.step_time for step in steps)
    verified = [length for step in steps for length in step.verified]
    accepted = [length for step in steps for length in step.accepted]
    return {
        "tokens_per_second": sum(step.emitted for step in steps) / wall,
        "steps": len(steps),
        "step_ms": 1e3 * times[len(times) // 2],
        "rows": sum(step.rows for step in steps) / len(steps),
        "verified": sum(verified) / max(1, len(verified)),
        "tau": 1.0 + sum(accepted) / max(1, len(accepted)),
        "worker_idle": max(0.0, 1.0 - busy / wall),
        "wait_ms": 1e3 * wait,
        "lost_ms": 1e3 * lost,
    }


def run_engine(parts: Parts, work: Callable[[AsyncEngine], Any], worker: Any = None) -> Any:
    """`await work(engine)` between the engine's start and its end; `worker` instead of the parts' own."""

    async def whole() -> Any:
        engine = AsyncEngine(parts.loop, worker or parts.worker, parts.tokenizer, max_queued=1 << 20)
        await engine.start()
        try:
            return await work(engine)
        finally:
            await engine.drain(0.0)

    return asyncio.run(whole())
