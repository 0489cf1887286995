"""The server's own figures, from its Prometheus endpoint, read on a thread beside the load."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

#: by what names servers call a figure, after a prefix of their own (dspark:, vllm:, llamacpp:, sglang:)
NAMES: dict[str, tuple[str, ...]] = {
    "generated": ("generation_tokens_total", "tokens_predicted_total"),
    "prompted": ("prompt_tokens_total",),
    "cached": ("prompt_tokens_cached_total", "prefix_cache_hits_total"),
    "preemptions": ("num_preemptions_total",),
    "drafts": ("spec_decode_num_drafts_total",),
    "verified": ("spec_decode_num_draft_tokens_total", "spec_decode_num_draft_tokens"),
    "accepted": ("spec_decode_num_accepted_tokens_total",),
    "proposed": ("spec_decode_num_proposed_tokens_total",),
    "expected": ("spec_decode_expected_accepted_tokens_total",),
    "forecast_tokens": ("forecast_tokens_total",),
    "forecast_seconds": ("forecast_seconds_total",),
    "measured_tokens": ("forecast_measured_tokens_total",),
    "measured_seconds": ("forecast_measured_seconds_total",),
    "verify_length_sum": ("verify_length_sum",),
    "verify_length_count": ("verify_length_count",),
    "steps": ("step_seconds_count",),
    "step_seconds": ("step_seconds_sum",),
    "step_rows": ("step_rows_sum",),
    "rejections": ("admission_rejections_total",),
    "cancelled": ("cancelled_requests_total",),
}
#: figures that stand for a moment, not for a sum
LEVELS: dict[str, tuple[str, ...]] = {
    "running": ("num_requests_running", "requests_processing"),
    "waiting": ("num_requests_waiting", "requests_deferred"),
    "kv_usage": ("kv_cache_usage_perc", "kv_cache_usage_ratio"),
}
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos_total"


@dataclass(frozen=True, slots=True)
class Scrape:
    """One look: figures by our names, those that the server has, summed over labels."""

    time: float
    values: Mapping[str, float]
    positions: Mapping[int, float]


def parse(text: str, now: float) -> Scrape:
    """From an exposition in Prometheus' text format. Raises ValueError if it is none."""
    from prometheus_client.parser import text_string_to_metric_families

    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            bare = sample.name.rpartition(":")[2]
            totals[bare] = totals.get(bare, 0.0) + sample.value
            if bare == _PER_POSITION and sample.labels.get("position", "").isdigit():
                place = int(sample.labels["position"])
                positions[place] = positions.get(place, 0.0) + sample.value
    values = {}
    for name, candidates in (NAMES | LEVELS).items():
        found = next((totals[candidate] for candidate in candidates if candidate in totals), None)
        if found is not None:
            values[name] = found
    return Scrape(now, values, positions)


def truth(scrapes: Sequence[Scrape], begin: float, end: float) -> dict[str, Any] | None:
    """What the server says happened between two times, from the looks closest to them; None without two."""
    if len(scrapes) < 2:
        return None
    first = min(scrapes, key=lambda scrape: abs(scrape.time - begin))
    last = min(scrapes, key=lambda scrape: abs(scrape.time - end))
    if first.time >= last.time:
        first, last = scrapes[0], scrapes[-1]
    grown = {
        name: value - first.values.get(name, 0.0) for name, value in last.values.items() if name in NAMES
    }
    out: dict[str, Any] = {"seconds": last.time - first.time}
    counts = ("generated", "prompted", "cached", "preemptions", "rejections", "cancelled", "steps")
    out |= {name: round(grown[name]) for name in counts if name in grown}
    seconds = last.time - first.time
    ratios = {
        "generated_per_second": (grown.get("generated"), seconds),
        "mean_step_ms": (_times(grown.get("step_seconds"), 1e3), grown.get("steps")),
        "rows_per_step": (grown.get("step_rows"), grown.get("steps")),
        "acceptance_rate": (grown.get("accepted"), grown.get("verified")),
        "verify_length": (grown.get("verify_length_sum"), grown.get("verify_length_count")),
        "verified_share": (grown.get("verified"), grown.get("proposed")),
        "expected_over_accepted": (grown.get("expected"), grown.get("accepted")),
        "forecast_over_measured_tokens": (grown.get("forecast_tokens"), grown.get("measured_tokens")),
        "forecast_over_measured_seconds": (grown.get("forecast_seconds"), grown.get("measured_seconds")),
    }
    out |= {name: top / below for name, (top, below) in ratios.items() if top is not None and below}
    if grown.get("drafts"):
        drafts = grown["drafts"]
        out["accepted_length"] = 1.0 + grown["accepted"] / drafts
        out["acceptance_by_position"] = [
            (last.positions[place] - first.positions.get(place, 0.0)) / drafts
            for place in sorted(last.positions)
            if last.positions[place] > 0
        ]
    within = [scrape for scrape in scrapes if begin <= scrape.time <= end] or [last]
    for name in LEVELS:
        levels = [scrape.values[name] for scrape in within if name in scrape.values]
        if levels:
            out[f"peak_{name}"] = max(levels)
    return out


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


class Scraper:
    """Looks at /metrics now, every `interval` seconds, and when stopped. A server without it is fine."""

    def __init__(self, url: str, interval: float) -> None:
        self.scrapes: list[Scrape] = []
        self._url = url.rstrip("/").removesuffix("/v1") + "/metrics"
        self._interval = interval
        self._stopped = threading.Event()
        self.look()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        if self.scrapes:
            self._thread.start()

    def look(self, patience: float = 5.0) -> None:
        """One look; nothing is noted when it fails."""
        import httpx

        try:
            reply = httpx.get(self._url, timeout=patience, headers={"Accept": "text/plain"})
            if reply.status_code == 200:
                self.scrapes.append(parse(reply.text, time.perf_counter()))
        except (httpx.HTTPError, ValueError):
            pass

    def stop(self) -> list[Scrape]:
        """The looks so far, a last one included."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(6.0)
            self.look(30.0)
        return self.scrapes

    def _watch(self) -> None:
        while not self._stopped.wait(self._interval):
            self.look()
