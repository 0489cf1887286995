"""What a sweep says: rungs with intervals, the knee, Pareto curves and gains on them. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from loadtest.stats import Estimate, estimate

#: figures of a point by name: where they stand in the result of a run
FIGURES: dict[str, tuple[str, ...]] = {
    "throughput": ("throughput", "output_tokens_per_second"),
    "pace": ("throughput", "tokens_per_second_per_user"),
    "requests": ("throughput", "requests_per_second"),
    "ttft_p50": ("latency_ms", "ttft", "p50"),
    "ttft_p95": ("latency_ms", "ttft", "p95"),
    "tpot_p50": ("latency_ms", "tpot", "p50"),
    "tpot_p95": ("latency_ms", "tpot", "p95"),
    "e2e_p50": ("latency_ms", "e2e", "p50"),
    "attainment": ("slo", "attainment"),
    "goodput": ("slo", "goodput_requests_per_second"),
    "verify_length": ("server", "verify_length"),
    "acceptance": ("server", "acceptance_rate"),
    "accepted_length": ("server", "accepted_length"),
    "step_ms": ("server", "mean_step_ms"),
}


@dataclass(frozen=True, slots=True)
class Rung:
    """One configuration at one load, over all seeds; figures that nobody knows are missing."""

    load: float
    figures: Mapping[str, Estimate]
    runs: int
    failed: int = 0
    saturated: bool = False
    degraded: bool = False
    agree: bool = True

    def mean(self, name: str) -> float | None:
        figure = self.figures.get(name)
        return None if figure is None else figure.mean


def figure(result: Mapping[str, Any], name: str) -> float | None:
    """One figure of a run's result."""
    value: Any = result
    for key in FIGURES[name]:
        value = value.get(key) if isinstance(value, Mapping) else None
    return None if value is None else float(value)


def rung(load: float, results: Sequence[Mapping[str, Any]]) -> Rung:
    """The runs of one configuration at one load, together."""
    figures = {}
    for name in FIGURES:
        values = [value for value in (figure(result, name) for result in results) if value is not None]
        if values:
            figures[name] = estimate(values)
    if len(results) == 1 and "throughput" in figures:  # of one run the margin is that of its ten parts
        margin = results[0]["throughput"].get("output_tokens_per_second_margin")
        figures["throughput"] = Estimate(figures["throughput"].mean, margin)
    requests = [result["requests"] for result in results]
    return Rung(
        load,
        figures,
        len(results),
        sum(each["error"] + each["unfinished"] for each in requests),
        any((result["cut_short"] or "").startswith("saturated") for result in results),
        any(result["health"]["degraded"] for result in results),
        all(result["tokens"].get("agree", True) for result in results),
    )


@dataclass(frozen=True, slots=True)
class Knee:
    """How much load keeps the objective: largest that passes, smallest that fails, None where there is none.

    Not `monotone`: some load fails below one that passes, so the true knee lies in the noise between.
    """

    passing: float | None
    failing: float | None
    monotone: bool


def knee(rungs: Sequence[Rung], attainment: float) -> Knee | None:
    """None where no objective was given, or no request was measured."""
    judged = [(each.load, level) for each in rungs if (level := each.mean("attainment")) is not None]
    if not judged:
        return None
    passing = [load for load, level in judged if level >= attainment and not _saturated(rungs, load)]
    failing = [load for load, level in judged if load not in passing]
    most, least = max(passing, default=None), min(failing, default=None)
    return Knee(most, least, most is None or least is None or most < least)


def _saturated(rungs: Sequence[Rung], load: float) -> bool:
    return any(each.saturated for each in rungs if each.load == load)


Curve = Sequence[tuple[float, float]]


def pareto(rungs: Sequence[Rung]) -> list[tuple[float, float]]:
    """(tokens/s/user, tokens/s) of each rung, in order of load"""
    points = [(each.mean("pace"), each.mean("throughput")) for each in rungs]
    return [(pace, through) for pace, through in points if pace is not None and through is not None]


def throughput_at(curve: Curve, pace: float) -> float | None:
    """Most tokens/s of a curve at a pace per user, between rungs linearly; None where none was measured."""
    return _crossing(curve, pace)


def pace_at(curve: Curve, throughput: float) -> float | None:
    """The fastest pace per user at a throughput, in the same way."""
    return _crossing([(through, pace) for pace, through in curve], throughput)


def _crossing(curve: Curve, place: float) -> float | None:
    found = [value for at, value in curve if at == place]
    for (x0, y0), (x1, y1) in pairwise(curve):
        if min(x0, x1) < place < max(x0, x1):
            found.append(y0 + (place - x0) / (x1 - x0) * (y1 - y0))
    return max(found, default=None)


@dataclass(frozen=True, slots=True)
class Gain:
    """How a configuration stands to the baseline at one point of the baseline's curve."""

    load: float
    pace: float
    throughput: float
    #: throughput at the same pace per user, over the baseline's; None: the curves do not overlap there
    more_throughput: float | None
    #: pace per user at the same throughput, over the baseline's
    faster: float | None


def gains(baseline: Sequence[Rung], other: Sequence[Rung]) -> list[Gain]:
    """The paper's two questions, asked at every rung of the baseline."""
    curve = pareto(other)
    out = []
    for each in baseline:
        pace, through = each.mean("pace"), each.mean("throughput")
        if pace and through:
            same_pace, same_throughput = throughput_at(curve, pace), pace_at(curve, through)
            out.append(
                Gain(
                    each.load,
                    pace,
                    through,
                    None if same_pace is None else same_pace / through,
                    None if same_throughput is None else same_throughput / pace,
                )
            )
    return out
