"""What speculation does, for Prometheus: the names that dashboards know, and forecasts beside the truth."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge

from engine.outputs import EngineGauges, StepStats
from server.histogram import LENGTHS, Histogram

_COUNTERS = {
    "spec_decode_num_drafts": "Drafts verified",
    "spec_decode_num_draft_tokens": "Draft tokens verified",
    "spec_decode_num_accepted_tokens": "Draft tokens accepted",
    "spec_decode_num_proposed_tokens": "Draft tokens that waited for verification, verified or not",
    "spec_decode_num_slots": "Tokens that a draft model was told to draft",
    "spec_decode_expected_accepted_tokens": "Draft tokens that were expected to be accepted, by survival",
    "forecast_tokens": "Tokens that steps were expected to emit",
    "forecast_seconds": "Seconds that steps were expected to take; steps without a forecast not counted",
    "forecast_measured_tokens": "Tokens that the steps with a forecast emitted",
    "forecast_measured_seconds": "Seconds that the steps with a forecast took",
}
_GAUGES = {
    "verify_capacity": "Rows that drafts could have had in the last step",
    "steps_per_second": "SPS that the throughput model says for the last step's batch; 0 without a model",
    "spec_decode_collapsed": "1 while drafts have long been too bad to pay at any load",
}


class SpecMetrics:
    """Fed with steps and gauges by `server.metrics.Metrics`."""

    def __init__(self, registry: CollectorRegistry, prefix: str, model: str) -> None:
        self._model = model

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(prefix + name, text, ["model_name", *labels], registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(prefix + name, text, ["model_name", *labels], registry=registry)

        self._counters = {name: counter(name, text).labels(model) for name, text in _COUNTERS.items()}
        self._gauges = {name: gauge(name, text).labels(model) for name, text in _GAUGES.items()}
        at = counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft",
            "position",
        )
        self._accepted_at = [at.labels(model, str(position)) for position in range(16)]
        self._undrafted = counter(
            "spec_decode_steps_without_draft", "Steps after which no model drafted, by reason", "reason"
        )
        self._error = gauge(
            "spec_decode_calibration_error",
            "Expected calibration error of conditional acceptance of late, by how requests sample",
            "regime",
        )
        labels = {"model_name": model}
        self._verify_length = Histogram(
            registry,
            prefix + "verify_length",
            "Draft tokens verified, per decoding sequence and step",
            LENGTHS,
            labels,
        )
        self._accepted_length = Histogram(
            registry,
            prefix + "accepted_length",
            "Tokens gained per verified draft, the bonus token included",
            (*LENGTHS[1:], 17.0),
            labels,
        )

    def step(self, stats: StepStats) -> None:
        counters = self._counters
        for verified in stats.verified:
            self._verify_length.observe(verified)
        drafts = [pair for pair in zip(stats.verified, stats.accepted, strict=True) if pair[0]]
        if drafts:
            counters["spec_decode_num_drafts"].inc(len(drafts))
            counters["spec_decode_num_draft_tokens"].inc(sum(verified for verified, _ in drafts))
            self._accepted([accepted for _, accepted in drafts])
        counters["spec_decode_num_proposed_tokens"].inc(sum(stats.waiting))
        counters["spec_decode_num_slots"].inc(sum(stats.slots))
        counters["spec_decode_expected_accepted_tokens"].inc(sum(stats.expected))
        if stats.undrafted is not None:
            self._undrafted.labels(self._model, stats.undrafted).inc()
        self._gauges["verify_capacity"].set(stats.capacity)
        if stats.forecast_time:
            counters["forecast_tokens"].inc(stats.forecast_tokens)
            counters["forecast_seconds"].inc(stats.forecast_time)
            counters["forecast_measured_tokens"].inc(stats.decided)
            counters["forecast_measured_seconds"].inc(stats.step_time)
        self._gauges["steps_per_second"].set(1.0 / stats.forecast_time if stats.forecast_time else 0.0)

    def _accepted(self, lengths: Iterable[int]) -> None:
        reached = [0] * len(self._accepted_at)
        total = 0
        for length in lengths:
            self._accepted_length.observe(length + 1)
            total += length
            for position in range(min(length, len(reached))):
                reached[position] += 1
        self._counters["spec_decode_num_accepted_tokens"].inc(total)
        for counter, count in zip(self._accepted_at, reached, strict=True):
            if count == 0:
                break
            counter.inc(count)

    def gauges(self, gauges: EngineGauges) -> None:
        self._gauges["spec_decode_collapsed"].set(gauges.collapsed)
        for regime, error in gauges.calibration_errors:
            self._error.labels(self._model, regime).set(error)
