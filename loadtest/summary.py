"""From records to figures. Pure: what a run means does not depend on when it is looked at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.record import Record
from loadtest.slo import Slo
from loadtest.stats import (
    batch_means,
    estimate,
    percentile,
    percentile_interval,
    supports,
    weighted_percentile,
)

SHARES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Window:
    """The measured span, in seconds of the clock."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin

    def holds(self, time: float | None) -> bool:
        return time is not None and self.begin <= time < self.end


def summarize(records: Iterable[Record], window: Window, slo: Slo | None) -> dict[str, Any]:
    """All figures of a run, JSON's types only. Latencies are of the requests that were due in the window;
    rates count what happened in it, whichever request it belonged to."""
    records = list(records)
    load = [record for record in records if record.kind == "load"]
    due = [record for record in load if window.holds(record.intended)]
    probes = [record for record in records if record.kind == "probe" and window.holds(record.intended)]
    out = _counts(due) | {"throughput": throughput(load, window), "latency_ms": latencies(due)}
    out["tokens"] = tokens(records)
    if slo is not None:
        out["slo"] = attainment(due, window, slo)
    if probes:
        out["probes"] = _counts(probes) | {"e2e_ms": spread([p.e2e for p in probes if p.ok])}
    names = sorted({record.name for record in due})
    if len(names) > 1:
        out["by_name"] = {
            name: _counts(own) | {"latency_ms": latencies(own)}
            for name, own in ((name, [record for record in due if record.name == name]) for name in names)
        }
    return out


def _counts(due: Sequence[Record]) -> dict[str, Any]:
    outcomes = Counter(record.outcome for record in due)
    wanted = [record for record in due if record.ok and record.wanted_tokens is not None]
    return {
        "requests": {
            # A user who left on purpose has not been failed by the server.
            "attempted": len(due) - outcomes["cancelled"],
            **{name: outcomes[name] for name in ("ok", "error", "unfinished", "cancelled")},
            "finish_reasons": dict(Counter(r.finish_reason for r in due if r.finish_reason)),
            "wrong_length": sum(record.tokens != record.wanted_tokens for record in wanted),
            "uncounted": sum(record.ok and record.completion_tokens is None for record in due),
        },
        "errors": dict(Counter(r.error or r.outcome for r in due if r.outcome in ("error", "unfinished"))),
    }


def latencies(due: Sequence[Record]) -> dict[str, Any]:
    """Of the completed requests, in milliseconds; ITL a token weighs each gap by the tokens it brought."""
    done = [record for record in due if record.ok]
    gaps = [gap for record in done for gap in record.gaps]
    brought = [count for record in done for count in record.gap_tokens]
    by_token = [(gap / count, count) for gap, count in zip(gaps, brought, strict=True) if count > 0]
    out: dict[str, Any] = {
        "ttft": spread([record.ttft for record in done]),
        "tpot": spread([record.tpot for record in done]),
        "itl_chunk": spread(gaps, independent=False),
        "itl_token": _weighted([gap for gap, _ in by_token], [count for _, count in by_token]),
        "e2e": spread([record.e2e for record in done]),
    }
    if gaps:
        out["tokens_per_chunk"] = {"mean": sum(brought) / len(brought), "max": max(brought)}
    # Nobody counted: what is said by token is then said by chunk.
    out["tokens_are_chunks"] = any(record.completion_tokens is None for record in done)
    return out


def spread(values: Sequence[float | None], independent: bool = True) -> dict[str, Any] | None:
    """Mean with margin, percentiles, and which of them the sample cannot support; None when it is empty.

    Gaps of one request depend on each other: `independent` false leaves the margins out.
    """
    ordered = sorted(1e3 * value for value in values if value is not None)
    if not ordered:
        return None
    whole = estimate(ordered)
    out: dict[str, Any] = {"count": len(ordered), "mean": whole.mean, "min": ordered[0], "max": ordered[-1]}
    out |= {name: percentile(ordered, share) for name, share in SHARES.items()}
    out["unsupported"] = [name for name, share in SHARES.items() if not supports(len(ordered), share)]
    if independent:
        out["margin"] = whole.margin
        out["p95_interval"] = percentile_interval(ordered, 0.95)
    return out


def _weighted(values: Sequence[float], weights: Sequence[int]) -> dict[str, Any] | None:
    if not values:
        return None
    total = sum(weights)
    out: dict[str, Any] = {
        "count": total,
        "mean": 1e3 * sum(value * weight for value, weight in zip(values, weights, strict=True)) / total,
        "min": 1e3 * min(values),
        "max": 1e3 * max(values),
    }
    out |= {name: 1e3 * weighted_percentile(values, weights, share) for name, share in SHARES.items()}
    out["unsupported"] = [name for name, share in SHARES.items() if not supports(total, share)]
    return out


def throughput(load: Sequence[Record], window: Window) -> dict[str, Any]:
    """Per second of the window: tokens when they arrived, requests when they ended, prompts when first
    answered. The margin is from ten parts of the window."""
    times, amounts = arrivals_of_tokens(load)
    parts = batch_means(times, amounts, window.begin, window.end) if window.seconds > 0 else [0.0]
    output = estimate(parts)
    ended = [record for record in load if record.ok and window.holds(record.ended)]
    prompts = sum(record.prompt_tokens or 0 for record in load if window.holds(record.first_text))
    paces = [record.tpot for record in load if record.ok and window.holds(record.intended) and record.tpot]
    seconds = max(window.seconds, 1e-9)
    return {
        "requests_per_second": len(ended) / seconds,
        "output_tokens_per_second": output.mean,
        "output_tokens_per_second_margin": output.margin,
        "output_tokens_per_second_parts": parts,
        "prompt_tokens_per_second": prompts / seconds,
        "total_tokens_per_second": output.mean + prompts / seconds,
        "tokens_per_second_per_user": len(paces) / sum(paces) if paces else None,
        "mean_in_flight": in_flight(load, window),
        "peak_in_flight": peak_in_flight(load, window),
    }


def arrivals_of_tokens(records: Sequence[Record]) -> tuple[list[float], list[int]]:
    """When tokens came and how many, of all requests, in no particular order."""
    times: list[float] = []
    amounts: list[int] = []
    for record in records:
        if record.times:
            times += record.times
            amounts += [record.progress[0], *record.gap_tokens]
    return times, amounts


def in_flight(load: Sequence[Record], window: Window) -> float:
    """Requests under way, averaged over the window, from when they were due."""
    held = 0.0
    for record in load:
        end = window.end if record.ended is None else record.ended
        held += max(0.0, min(end, window.end) - max(record.intended, window.begin))
    return held / max(window.seconds, 1e-9)


def peak_in_flight(load: Sequence[Record], window: Window) -> int:
    """Most requests under way at once within the window, from when they were sent."""
    changes: list[tuple[float, int]] = []
    for record in load:
        begin = max(record.started, window.begin)
        end = min(window.end, window.end if record.ended is None else record.ended)
        if begin < end:
            changes += [(begin, 1), (end, -1)]
    level = most = 0
    for _, change in sorted(changes):
        level += change
        most = max(most, level)
    return most


def tokens(records: Sequence[Record]) -> dict[str, int]:
    """Output tokens of the whole run, warm-up and probes included, as they reached us."""
    sums: Counter[str] = Counter()
    for record in records:
        sums["completed" if record.ok else "cut_off"] += record.tokens
    return {"completed": sums["completed"], "cut_off": sums["cut_off"]}


def attainment(due: Sequence[Record], window: Window, slo: Slo) -> dict[str, Any]:
    """Shares of all attempted requests, failed ones included; goodput a second of the window."""
    attempted = [record for record in due if record.outcome != "cancelled"]
    good = [record for record in attempted if slo.good(record)]
    seconds, count = max(window.seconds, 1e-9), len(attempted)
    return {
        "limits": str(slo),
        "attempted": count,
        "good": len(good),
        "attainment": len(good) / count if count else None,
        "by_limit": {
            name: sum(slo.kept(record, name, limit) for record in attempted) / count if count else None
            for name, limit in slo.limits
        },
        "goodput_requests_per_second": len(good) / seconds,
        "goodput_tokens_per_second": sum(record.tokens for record in good) / seconds,
    }
