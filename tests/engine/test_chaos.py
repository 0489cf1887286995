"""Hundreds of requests, aborted at any moment, on too few pages: every text is right and nothing is left."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from engine.drafter import Drafter
from engine.outputs import NullObserver, OutputDelta, RequestStats
from engine.request import ActiveRequest
from engine.speculation import Speculation
from scheduler.curve import Curve
from scheduler.policies import parse_policy
from scheduler.throughput import Throughput
from tests.engine.harness import (
    VOCAB,
    Engine,
    GuessDrafter,
    Output,
    babbler,
    one_thread,  # noqa: F401
    oracle,
    tiny,
)

PHASES = ("before begin", "after begin", "after the worker", "after commit")


@dataclass
class Plan:
    """A request, when it arrives, and when it is aborted: so many steps after that, and in which phase.

    The steps count from its `arrival`, its first `seat` or its first `token`.
    """

    name: str
    prompt: list[int]
    params: dict[str, Any]
    arrives: int = 0
    aborted: tuple[int, str] | None = None
    since: str = "arrival"
    salt: str = ""
    expected: list[Output] = field(default_factory=list)


class Counts(NullObserver):
    """What the engine reported."""

    def __init__(self) -> None:
        self.ends: list[RequestStats] = []
        self.preemptions: list[int] = []

    def finished(self, stats: RequestStats) -> None:
        self.ends.append(stats)

    def preempted(self) -> None:
        self.preemptions.append(1)


def run(engine: Engine, plans: list[Plan]) -> Counter[str]:
    """Serve the plans; returns how many were aborted while alive, by phase and by their state then."""
    counts: Counter[str] = Counter()
    arrived: dict[str, tuple[Plan, ActiveRequest, dict[str, int]]] = {}
    todo = sorted(plans, key=lambda plan: plan.arrives)
    now = 0

    def maybe_abort(phase: str) -> None:
        for plan, active, since in arrived.values():
            if active.admitted is not None:
                since.setdefault("seat", now)
            if active.first_token is not None:
                since.setdefault("token", now)
            if plan.since in since and plan.aborted == (now - since[plan.since], phase):
                if not active.finished:
                    state = {sequence.status.value for sequence in active.sequences}
                    counts.update([phase, *state])
                    if any(s.pages and not s.generated for s in active.sequences):
                        counts.update(["prefilling"])
                else:
                    counts.update(["too late"])
                engine.loop.abort(plan.name)
                engine.loop.abort(plan.name)  # twice is once

    def release() -> None:
        while todo and (todo[0].arrives <= now or not engine.loop.has_work):
            plan = todo.pop(0)
            active = engine.add(plan.name, plan.prompt, cache_salt=plan.salt, **plan.params)
            arrived[plan.name] = (plan, active, {"arrival": now})

    while todo or engine.loop.has_work:
        release()
        maybe_abort("before begin")
        batch = engine.loop.begin()
        maybe_abort("after begin")
        if batch is None:
            engine.take(engine.loop.drain_aborted())
        else:
            result = engine.worker.run(batch)
            maybe_abort("after the worker")
            engine.take(engine.loop.commit(batch, result))
            engine.pool.check()
        maybe_abort("after commit")
        now += 1
        assert now < 20_000, "the engine does not come to an end"
    return counts


def check_outputs(engine: Engine, plans: list[Plan]) -> None:
    for plan in plans:
        outputs = engine.outputs[plan.name]
        for output, expected in zip(outputs, plan.expected, strict=True):
            if output.finish == "abort":
                assert plan.aborted is not None
                assert output.tokens == expected.tokens[: len(output.tokens)]
                assert expected.text.startswith(output.text)
            else:
                assert output == expected, plan


def check_nothing_left(engine: Engine) -> None:
    engine.check_idle()
    assert not engine.loop.drain_aborted()
    gauges = engine.loop.gauges()
    assert (gauges.running, gauges.waiting, gauges.queued_tokens, gauges.kv_usage) == (0, 0, 0, 0.0)
    assert gauges.pages_free + gauges.pages_cached == gauges.pages_total == engine.pool.num_pages
    assert engine.pool.flush() == gauges.pages_cached
    engine.pool.check()
    assert engine.pool.free_count == engine.pool.num_pages


def write_expected(plans: list[Plan]) -> None:
    """Each request alone, without speculation and without a cache."""
    for plan in plans:
        engine = Engine(tiny(), prefix_caching=False)
        engine.add(plan.name, plan.prompt, **plan.params)
        engine.run()
        plan.expected = engine.outputs[plan.name]


def random_plans(rng: np.random.Generator, count: int) -> list[Plan]:
    """Prompts share beginnings; parameters are drawn one by one."""
    stems = [rng.integers(3, VOCAB, size).tolist() for size in (4, 9, 17)]
    plans = []
    arrives = 0
    for i in range(count):
        arrives += int(rng.geometric(0.45)) - 1
        stem = stems[rng.integers(len(stems))]
        prompt = (
            stem[: int(rng.integers(1, len(stem) + 1))]
            + rng.integers(3, VOCAB, int(rng.integers(0, 10))).tolist()
        )
        if rng.random() < 0.1:
            prompt = (stem * 8)[:36]
        params: dict[str, Any] = {"max_tokens": int(rng.integers(1, 20))}
        if rng.random() < 0.3:
            params["temperature"] = 0.0
        else:
            params["seed"] = int(rng.integers(-5, 1000))
            params["temperature"] = float(rng.choice([0.5, 1.0, 1.6]))
        options = {
            "top_k": int(rng.integers(1, 20)),
            "top_p": float(rng.choice([0.5, 0.9])),
            "min_p": 0.05,
            "presence_penalty": 0.7,
            "repetition_penalty": 1.3,
            "logit_bias": {int(rng.integers(VOCAB)): 5.0},
            "min_tokens": int(rng.integers(params["max_tokens"] + 1)),
            "ignore_eos": True,
            "logprobs": 2,
            "stop": tuple(rng.choice(["a", "bc", "ed", "zz", "k", "qr"], 2, replace=False).tolist()),
            "stop_token_ids": tuple(rng.integers(VOCAB, size=2).tolist()),
            "n": int(rng.integers(2, 5)),
        }
        params.update({key: value for key, value in options.items() if rng.random() < 0.15})
        plan = Plan(f"request {i}", prompt, params, arrives, salt=str(rng.choice(["", "", "salt"])))
        if rng.random() < 0.4:
            plan.since = str(rng.choice(["arrival", "seat", "token"]))
            plan.aborted = (int(rng.geometric(0.4)) - 1, PHASES[rng.integers(len(PHASES))])
        plans.append(plan)
    return plans


def strip_logprobs(outputs: list[Output]) -> None:
    """Compare tokens and texts exactly; other rows beside them move the last bits of a logprob."""
    for output in outputs:
        output.logprobs = [(each.token_id, [top for top, _ in each.top]) for each in output.logprobs]


def capricious(plans: list[Plan], rng: np.random.Generator) -> Drafter:
    """Right, wrong, silly or silent, differently each time."""
    know = oracle(*(plan.prompt + output.tokens for plan in plans for output in plan.expected))
    babble = babbler(3)

    def guess(tokens: list[int], slots: int) -> Any:
        mood = rng.random()
        if mood < 0.4:
            return know.guess(tokens, slots)
        if mood < 0.6:
            right = list(know.guess(tokens, slots))
            if right:
                right[int(rng.integers(len(right)))] = int(rng.integers(VOCAB))
            return right
        return babble.guess(tokens, slots) if mood < 0.9 else ()

    return GuessDrafter(guess)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "policy"), [(0, "fixed:4"), (1, "lookahead"), (2, "lagged"), (4, "threshold:base=0.1")]
)
def test_hundreds_of_requests_with_aborts_on_too_few_pages(seed, policy):
    rng = np.random.default_rng(seed)
    plans = random_plans(rng, 250)
    write_expected(plans)
    observer, ticks = Counts(), itertools.count()
    engine = Engine(
        tiny(),
        capricious(plans, rng),
        speculation(policy, 4),
        num_pages=32,
        page_size=2,
        token_budget=24,
        max_sequences=10,
        max_model_len=64,
        observer=observer,
        clock=lambda: next(ticks) * 0.001,  # so that ageing does not depend on this machine
    )
    counts = run(engine, plans)
    for plan in plans:
        strip_logprobs(engine.outputs[plan.name])
        strip_logprobs(plan.expected)
    check_outputs(engine, plans)
    check_nothing_left(engine)

    # It was chaos indeed.
    assert len(observer.preemptions) > 20
    assert all(counts[phase] >= 5 for phase in PHASES), counts
    assert all(counts[state] >= 5 for state in ("waiting", "running", "prefilling", "too late")), counts
    assert len(observer.ends) == len(plans)
    kinds = Counter(stats.finish_reason for stats in observer.ends)
    assert min(kinds["stop"], kinds["length"], kinds["abort"]) > 10
    assert sum(stats.usage.accepted_tokens for stats in observer.ends) > 20
    assert sum(stats.usage.cached_tokens for stats in observer.ends) > 30


def speculation(policy: str, gamma: int) -> Speculation:
    """Costs at which drafts pay, whatever this machine takes."""
    throughput = Throughput(Curve([(1, 1e-3), (64, 1.2e-3)]), Curve([(1, 1e-5), (64, 1e-4)]), weight=0.0)
    return Speculation(parse_policy(policy), gamma, throughput)


# ---- one small scenario, aborted everywhere

SCENARIO: dict[str, tuple[list[int], dict[str, Any]]] = {
    "decoding": ([3, 4, 5, 6, 7], {"max_tokens": 9, "n": 2, "seed": 1}),
    "prefilling": (list(range(3, 40)), {"max_tokens": 3, "temperature": 0.0}),
    "waiting": ([3, 4, 5, 6, 8], {"max_tokens": 5, "seed": 3, "stop": ("zz",)}),
}


def scenario(expected: dict[str, list[Output]] | None, policy: str = "fixed:2") -> tuple[Engine, list[Plan]]:
    plans = [
        Plan(name, prompt, {**params, "ignore_eos": True}) for name, (prompt, params) in SCENARIO.items()
    ]
    if expected is not None:
        for plan in plans:
            plan.expected = expected[plan.name]
    texts = [plan.prompt + output.tokens for plan in plans for output in plan.expected]
    engine = Engine(
        tiny(),
        oracle(*texts),
        speculation(policy, 2),
        num_pages=18,
        token_budget=9,
        max_sequences=3,
        max_model_len=48,
    )
    return engine, plans


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Output]]:
    _, plans = scenario(None)
    write_expected(plans)
    return {plan.name: plan.expected for plan in plans}


def steps_of_scenario(expected: dict[str, list[Output]]) -> int:
    engine, plans = scenario(expected)
    run(engine, plans)
    check_outputs(engine, plans)
    return engine.steps


@pytest.mark.parametrize("policy", ["fixed:2", "lookahead"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", SCENARIO)
def test_an_abort_at_every_point_of_every_step(expected, name, phase, policy):
    states: Counter[str] = Counter()
    for step in range(16):
        engine, plans = scenario(expected, policy)
        [victim] = [plan for plan in plans if plan.name == name]
        victim.aborted = (step, phase)
        counts = run(engine, plans)
        states.update(counts)
        check_outputs(engine, plans)
        check_nothing_left(engine)
        alive = not counts["too late"] and counts[phase]
        finishes = [output.finish for output in engine.outputs[name]]
        assert ("abort" in finishes) == bool(alive)
        others = [plan for plan in plans if plan is not victim]
        assert all(output.finish == "length" for plan in others for output in engine.outputs[plan.name])
    assert states[phase] >= 3, "the request was alive at several steps"
    assert states["running"]


@pytest.mark.parametrize("phase", PHASES)
def test_all_are_aborted_at_once_at_every_point(expected, phase):
    for step in range(10):
        engine, plans = scenario(expected)
        for plan in plans:
            plan.aborted = (step, phase)
        run(engine, plans)
        check_outputs(engine, plans)
        check_nothing_left(engine)


def test_an_abort_in_flight_takes_effect_at_commit_and_keeps_the_batch(expected):
    engine, plans = scenario(expected)
    for plan in plans:
        engine.add(plan.name, plan.prompt, **plan.params)
    engine.step()
    batch = engine.loop.begin()
    assert batch is not None
    held, available = engine.held_pages(), engine.pool.available
    frozen = [(item.sequence, item.count, item.pages.tolist()) for item in batch.items]
    engine.loop.abort("decoding")
    assert [(item.sequence, item.count, item.pages.tolist()) for item in batch.items] == frozen
    in_flight = {item.sequence for item in batch.items}
    decoding = engine.loop.requests["decoding"].sequences
    assert any(sequence.key in in_flight for sequence in decoding)
    assert all(sequence.pages for sequence in decoding if sequence.key in in_flight)
    assert held >= engine.held_pages()
    deltas: list[tuple[ActiveRequest, OutputDelta]] = engine.loop.commit(batch, engine.worker.run(batch))
    ends = [(d.index, d.finish_reason) for a, d in deltas if a.request.request_id == "decoding"]
    assert sorted(ends) == [(0, "abort"), (1, "abort")]
    assert not any(sequence.pages for sequence in decoding)
    assert "decoding" not in engine.loop.requests
    assert engine.pool.available >= available
    engine.take(deltas)
    engine.run()
    check_nothing_left(engine)


def test_aborting_what_is_unknown_or_finished_does_nothing(expected):
    engine, plans = scenario(expected)
    engine.loop.abort("nobody")
    assert not engine.loop.has_work
    engine.add("decoding", plans[0].prompt, **plans[0].params)
    engine.run()
    engine.loop.abort("decoding")
    assert not engine.loop.has_work
