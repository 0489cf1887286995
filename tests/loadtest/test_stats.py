from __future__ import annotations

import math
import random
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from loadtest.stats import (
    batch_means,
    bootstrap_ratio,
    estimate,
    percentile,
    percentile_interval,
    ratio_of_means,
    supports,
    t_quantile,
    trend,
    weighted_percentile,
)

VALUES = st.lists(st.floats(0, 1e6), min_size=1, max_size=40)


@given(VALUES, st.floats(0, 1))
def test_percentile_is_numpys(values: list[float], share: float) -> None:
    assert percentile(sorted(values), share) == pytest.approx(np.quantile(values, share), rel=1e-9, abs=1e-9)


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), min_size=1, max_size=20), st.floats(0, 1))
def test_a_weight_is_as_many_copies(pairs: list[tuple[float, int]], share: float) -> None:
    values, weights = zip(*pairs, strict=True)
    copies = sorted(value for value, weight in pairs for _ in range(weight))
    assert weighted_percentile(values, weights, share) == pytest.approx(percentile(copies, share), abs=1e-9)


def test_what_a_sample_supports() -> None:
    smallest = {
        share: next(n for n in range(1, 1000) if supports(n, share)) for share in (0.5, 0.9, 0.95, 0.99)
    }
    assert smallest == {0.5: 5, 0.9: 29, 0.95: 59, 0.99: 299}


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 9, 30, 1000])
def test_students_t(degrees: int) -> None:
    assert t_quantile(degrees) == pytest.approx(scipy_stats.t.ppf(0.975, degrees), rel=2e-3)


def test_margin_covers_the_mean_as_often_as_it_says() -> None:
    rng = random.Random(3)
    covered = 0
    for _ in range(2000):
        whole = estimate([rng.gauss(10, 2) for _ in range(6)])
        assert whole.margin is not None
        covered += abs(whole.mean - 10) <= whole.margin
    assert covered / 2000 == pytest.approx(0.95, abs=0.02)
    assert estimate([3.0]).margin is None


def test_percentile_interval_covers_it() -> None:
    rng = random.Random(4)
    truth, covered = -math.log(0.1), 0
    for _ in range(1000):
        interval = percentile_interval(sorted(rng.expovariate(1) for _ in range(200)), 0.9)
        assert interval is not None
        covered += interval[0] <= truth <= interval[1]
    assert covered / 1000 >= 0.93
    assert percentile_interval([1.0, 2.0, 3.0], 0.99) is None


def test_a_trend_is_seen_and_noise_is_not() -> None:
    rng = random.Random(5)
    times = [float(place) for place in range(60)]
    growth, sure = trend(times, [time + rng.gauss(0, 3) + 5 for time in times])
    assert sure
    assert growth > 1.0
    false = sum(trend(times, [10 + rng.gauss(0, 3) for _ in times])[1] for _ in range(400))
    assert false / 400 < 0.06
    assert trend(times[:9], times[:9]) == (0.0, False)


def test_ratios_have_honest_intervals() -> None:
    rng = random.Random(6)
    covered = 0
    for _ in range(300):
        a = [rng.gauss(100, 5) for _ in range(5)]
        b = [rng.gauss(120, 5) for _ in range(5)]
        ratio = ratio_of_means(a, b)
        assert ratio is not None
        assert ratio.low is not None
        assert ratio.high is not None
        covered += ratio.low <= 1.2 <= ratio.high
    assert covered / 300 >= 0.93
    a, b = [rng.expovariate(1) for _ in range(400)], [rng.expovariate(0.5) for _ in range(400)]
    booted = bootstrap_ratio(a, b, fmean)
    assert booted is not None
    assert booted.clear
    assert booted.low is not None
    assert booted.high is not None
    assert booted.low < 2.0 < booted.high
    assert bootstrap_ratio(a, a, fmean).clear is False  # type: ignore[union-attr]
    assert ratio_of_means([1.0], [2.0]).low is None  # type: ignore[union-attr]
    assert ratio_of_means([], [2.0]) is None


def test_batches_keep_the_total() -> None:
    times = [place / 10 for place in range(-5, 105)]
    rates = batch_means(times, [3] * len(times), 0.0, 10.0)
    assert rates == pytest.approx([30.0] * 10)
