"""`metrics` of a reply: how long its request took, and how its drafts fared; shaped as vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from engine.outputs import RequestStats
from server.settings import Settings

Detail = Literal["none", "summary", "detailed"]


def wanted_metrics(
    settings: Settings, asked: bool | None, stats: Sequence[RequestStats]
) -> dict[str, Any] | None:
    """As operator and request want them; None if neither does."""
    times, detail = settings.enable_per_request_metrics, settings.per_request_spec_decode_metrics
    if asked:
        times, detail = True, "summary" if detail == "none" else detail
    return metrics_json(stats, times, detail) if times or detail != "none" else None


def metrics_json(stats: Sequence[RequestStats], times: bool, detail: Detail) -> dict[str, Any]:
    """Of the requests that one reply was made from, one a prompt; times in milliseconds."""
    out: dict[str, Any] = _times(stats) if times else {}
    if detail != "none":
        out["speculative_decoding"] = _speculation(stats, detail == "detailed")
    return out


def _times(stats: Sequence[RequestStats]) -> dict[str, Any]:
    firsts = [each.ttft for each in stats if each.ttft is not None]
    tokens = sum(each.usage.completion_tokens for each in stats)
    first, last = (min(firsts), max(each.e2e for each in stats)) if firsts else (None, 0.0)
    generation = None if first is None else last - first
    gaps = [
        (each.e2e - each.ttft) * each.choices / (each.usage.completion_tokens - each.choices)
        for each in stats
        if each.ttft is not None and each.usage.completion_tokens > each.choices
    ]
    return {
        "time_to_first_token_ms": _ms(first),
        "generation_time_ms": _ms(generation),
        "queue_time_ms": _ms(max(each.queue_time for each in stats)),
        "mean_itl_ms": _ms(sum(gaps) / len(gaps)) if gaps else None,
        "tokens_per_second": round(tokens / last, 3) if last else None,
    }


def _speculation(stats: Sequence[RequestStats], detailed: bool) -> dict[str, Any]:
    verified = [count for each in stats for count in each.verified]
    accepted = [count for each in stats for count in each.accepted]
    drafted, gained, most = sum(verified), sum(accepted), max(verified, default=0)
    out: dict[str, Any] = {
        "mean_acceptance_length": round(1.0 + gained / len(verified), 4) if verified else None,
        "draft_acceptance_rate": round(gained / drafted, 4) if drafted else None,
        "acceptance_histogram": [accepted.count(length) for length in range(most + 1)],
        "num_spec_steps": len(verified),
        "num_accepted_draft_tokens": gained,
        "num_draft_tokens": drafted,
    }
    if detailed:
        out |= {"per_step_accepted": accepted, "per_step_drafted": verified}
    return out


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
