from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.curves import Knee, Rung, figure, gains, knee, pace_at, pareto, rung, throughput_at
from loadtest.generator import Tick
from loadtest.observe import Observation
from loadtest.record import Record
from loadtest.saturation import saturated
from loadtest.stats import Estimate


def at(load: float, saturated: bool = False, **figures: float) -> Rung:
    return Rung(
        load, {name: Estimate(value, None) for name, value in figures.items()}, 1, saturated=saturated
    )


@pytest.mark.parametrize(
    ("levels", "expected"),
    [
        ([1.0, 0.97, 0.9, 0.2], Knee(2, 3, True)),
        ([1.0, 0.9, 0.96, 0.2], Knee(3, 2, False)),
        ([1.0, 1.0, 1.0, 1.0], Knee(4, None, True)),
        ([0.5, 0.4, 0.3, 0.0], Knee(None, 1, True)),
    ],
)
def test_knee(levels: list[float], expected: Knee) -> None:
    rungs = [at(load, attainment=level) for load, level in enumerate(levels, 1)]
    assert knee(rungs, 0.95) == expected


def test_a_saturated_rung_does_not_pass_and_no_objective_has_no_knee() -> None:
    assert knee([at(1, attainment=1.0), at(2, saturated=True, attainment=1.0)], 0.95) == Knee(1, 2, True)
    assert knee([at(1)], 0.95) is None


BASE = [
    at(load, pace=pace, throughput=through)
    for load, pace, through in [(1, 100, 100), (2, 80, 160), (4, 50, 200)]
]
FAST = [
    at(load, pace=pace, throughput=through)
    for load, pace, through in [(1, 160, 160), (2, 100, 200), (4, 60, 240)]
]


def test_the_papers_two_questions() -> None:
    one, two, four = gains(BASE, FAST)
    assert one.more_throughput == pytest.approx(2.0)  # at 100 tok/s/user: 200 against 100
    assert two.more_throughput == pytest.approx(220 / 160)  # at 80: halfway between 200 and 240
    assert four.more_throughput is None  # slower than FAST is anywhere on the ladder
    assert one.faster is None  # FAST was never as idle as 100 tok/s
    assert two.faster == pytest.approx(160 / 80)
    assert four.faster == pytest.approx(100 / 50)


def test_a_baseline_gains_nothing_on_itself() -> None:
    for gain in gains(BASE, BASE):
        assert gain.more_throughput == pytest.approx(1.0)
        assert gain.faster == pytest.approx(1.0)


@given(st.floats(50, 100))
def test_curves_are_read_both_ways(pace: float) -> None:
    curve = pareto(BASE)
    through = throughput_at(curve, pace)
    assert through is not None
    assert pace_at(curve, through) == pytest.approx(pace)
    assert throughput_at(curve, 49.0) is None
    assert throughput_at(curve, 101.0) is None


def result(throughput: float, agree: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "throughput": {"output_tokens_per_second": throughput, "tokens_per_second_per_user": None},
        "latency_ms": {"ttft": {"p50": 5.0}, "tpot": None},
        "requests": {"error": 1, "unfinished": 2},
        "health": {"degraded": []},
        "tokens": {"agree": agree},
        "server": None,
        "cut_short": None,
    } | more


def test_rungs_gather_seeds() -> None:
    both = rung(
        4.0, [result(10.0), result(14.0, agree=False, cut_short="saturated: x", health={"degraded": ["y"]})]
    )
    assert both.mean("throughput") == 12.0
    assert both.figures["throughput"].margin == pytest.approx(12.706 * 2, rel=1e-3)
    assert both.mean("pace") is None
    assert (both.failed, both.saturated, both.degraded, both.agree) == (6, True, True, False)
    assert figure(result(3.0), "ttft_p50") == 5.0
    alone = result(10.0)
    alone["throughput"]["output_tokens_per_second_margin"] = 0.5
    assert rung(4.0, [alone]).figures["throughput"] == Estimate(10.0, 0.5)


def observed(backlog: float, seconds: int = 40) -> Observation:
    rng = random.Random(1)
    seen = Observation(100.0, 0.0)
    levels = [max(0, int(5 + backlog * second + rng.gauss(0, 1))) for second in range(seconds)]
    seen.ticks = [[Tick(100.5 + second, level, 0, 0, 0.0) for second, level in enumerate(levels)]]
    for second in range(seconds):
        record = Record("x", intended=100.0 + second)
        record.first_text = record.intended + 0.2 + backlog * 0.1 * second + rng.uniform(0, 0.1)
        seen.records.append(record)
    return seen


def test_falling_behind_is_noticed_and_noise_is_not() -> None:
    assert str(saturated(observed(2.0))).startswith("saturated")
    assert saturated(observed(0.0)) is None
    assert saturated(observed(2.0, seconds=8)) is None
