"""Statistics that say how much a sample can support. Pure functions over plain numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, variance

CONFIDENCE = 0.95
_Z = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and the half width of its 95 % interval (None: one value has no spread)."""

    mean: float
    margin: float | None


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value below which `share` (0 to 1) of the sorted, non-empty sample lies; linear in between."""
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def weighted_percentile(values: Sequence[float], weights: Sequence[int], share: float) -> float:
    """The same of a sample in which value i stands `weights[i]` times. The sample must not be empty."""
    pairs = sorted(zip(values, weights, strict=True))
    place = share * (sum(weights) - 1)
    below, above, seen = math.floor(place), math.ceil(place), 0
    low = None
    for value, weight in pairs:
        seen += weight
        if low is None and seen > below:
            low = value
        if seen > above:
            assert low is not None
            return low + (place - below) * (value - low)
    raise ValueError("the sample is empty")


def supports(count: int, share: float) -> bool:
    """Whether a sample of so many bounds the percentile from above with 95 % confidence, whatever the law.

    The largest of n values exceeds the percentile with probability 1 - share**n: p50 takes 5 values,
    p90 29, p95 59, p99 299.
    """
    return 1.0 - share**count >= CONFIDENCE


def t_quantile(degrees: int) -> float:
    """The two-sided 95 % quantile of Student's t: exact for 1 and 2 degrees, else by Cornish and Fisher."""
    if degrees < 1:
        raise ValueError("an interval needs two values")
    if degrees == 1:
        return math.tan(math.pi * CONFIDENCE / 2)
    if degrees == 2:
        return CONFIDENCE * math.sqrt(2 / (1 - CONFIDENCE**2))
    z, n = _Z, degrees
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and margin of independent, non-empty values."""
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean, None)
    return Estimate(mean, t_quantile(len(values) - 1) * math.sqrt(variance(values, mean) / len(values)))


def percentile_interval(ordered: Sequence[float], share: float) -> tuple[float, float] | None:
    """The order statistics around a percentile with 95 % confidence; None where the sample is too small."""
    count = len(ordered)
    spread = _Z * math.sqrt(count * share * (1 - share))
    low, high = math.floor(count * share - spread), math.ceil(count * share + spread)
    if low < 0 or high > count - 1:
        return None
    return ordered[low], ordered[high]


def trend(times: Sequence[float], values: Sequence[float]) -> tuple[float, bool]:
    """(growth over the span as a share of the mean level, whether the slope is surely above zero).

    By least squares with a t-interval; fewer than ten points show nothing.
    """
    count = len(times)
    if count < 10:
        return 0.0, False
    middle, level = fmean(times), fmean(values)
    spread = sum((time - middle) ** 2 for time in times)
    if spread == 0 or level <= 0:
        return 0.0, False
    slope = sum((time - middle) * (value - level) for time, value in zip(times, values, strict=True)) / spread
    rest = sum(
        (value - level - slope * (time - middle)) ** 2 for time, value in zip(times, values, strict=True)
    )
    error = math.sqrt(rest / (count - 2) / spread)
    return slope * (max(times) - min(times)) / level, slope > t_quantile(count - 2) * error


@dataclass(frozen=True, slots=True)
class Ratio:
    """B over A with its 95 % interval (None: unknown spread)."""

    value: float
    low: float | None
    high: float | None

    @property
    def clear(self) -> bool:
        """Whether the interval leaves 1 out."""
        return self.low is not None and self.high is not None and not self.low <= 1.0 <= self.high


def bootstrap_ratio(
    a: Sequence[float],
    b: Sequence[float],
    statistic: Callable[[Sequence[float]], float],
    rounds: int = 1000,
    seed: int = 0,
) -> Ratio | None:
    """How `statistic` of sample b stands to that of a, by resampling both; None where it is undefined."""
    if not a or not b or statistic(a) == 0:
        return None
    draw = random.Random(seed)
    ratios: list[float] = []
    for _ in range(rounds):
        bottom = statistic(draw.choices(a, k=len(a)))
        if bottom:
            ratios.append(statistic(draw.choices(b, k=len(b))) / bottom)
    value = statistic(b) / statistic(a)
    if len(a) < 5 or len(b) < 5 or len(ratios) < rounds // 2:
        return Ratio(value, None, None)
    ratios.sort()
    tail = (1 - CONFIDENCE) / 2
    return Ratio(value, percentile(ratios, tail), percentile(ratios, 1 - tail))


def ratio_of_means(a: Sequence[float], b: Sequence[float]) -> Ratio | None:
    """Mean of b over mean of a, with an interval by the delta method and the smaller sample's t."""
    if not a or not b or fmean(a) <= 0 or fmean(b) <= 0:
        return None
    value = fmean(b) / fmean(a)
    if min(len(a), len(b)) < 2:
        return Ratio(value, None, None)
    relative = math.sqrt(sum(variance(each) / len(each) / fmean(each) ** 2 for each in (a, b)))
    width = t_quantile(min(len(a), len(b)) - 1) * relative
    return Ratio(value, value * math.exp(-width), value * math.exp(width))


def batch_means(times: Sequence[float], amounts: Sequence[float], begin: float, end: float) -> list[float]:
    """Amounts per second in ten equal parts of the window: nearly independent, unlike single seconds."""
    parts = 10
    width = (end - begin) / parts
    sums = [0.0] * parts
    for time, amount in zip(times, amounts, strict=True):
        if begin <= time < end:
            sums[min(int((time - begin) / width), parts - 1)] += amount
    return [total / width for total in sums]
