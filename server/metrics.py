"""Prometheus metrics, named as vLLM names them so that dashboards fit, under a prefix of our own.

Each server has its own registry. The counting happens on the event loop, in the hooks of
`engine.outputs.EngineObserver`; a scrape only formats.
"""

from __future__ import annotations

from collections import deque

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics

from engine.outputs import EngineGauges, RequestStats, StepStats
from server.histogram import ROWS, SECONDS, Histogram
from server.spec_metrics import SpecMetrics

# The *_created series would double the exposition and tell nothing that a dashboard uses.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_GAUGES = {
    "num_requests_running": "Requests in the running batch",
    "num_requests_waiting": "Requests waiting for admission",
    "num_tokens_waiting": "Prompt tokens of the waiting requests",
    "kv_cache_usage_perc": "Share of KV pages held by live sequences; 1 is full",
    "kv_pages_free": "KV pages that hold nothing",
    "kv_pages_cached": "KV pages that hold a reusable prefix and no live sequence",
    "kv_pages_total": "KV pages",
    "step_age_seconds": "Seconds that the step in flight has been running; 0 if none is",
    "asyncio_tasks": "Tasks on the event loop; when idle, as many as after the start",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of finished requests",
    "prompt_tokens_cached": "Prompt tokens of finished requests that the prefix cache held",
    "generation_tokens": "Tokens generated",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache",
    "num_preemptions": "Sequences that lost their pages and were computed again",
    "corrupted_requests": "Requests ended because their logits were not finite",
    "cancelled_requests": "HTTP requests whose client left before the reply was complete",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From arrival to the first token", SECONDS),
    "inter_token_latency_seconds": ("Time per token after the first; k together count k times", SECONDS),
    "e2e_request_latency_seconds": ("From arrival to the last token", SECONDS),
    "request_queue_time_seconds": ("From arrival to admission", SECONDS),
    "step_seconds": ("Duration of an engine step", SECONDS),
    "forward_seconds": ("Of a step: the target's forward pass", SECONDS),
    "draft_seconds": ("Of a step: drafting", SECONDS),
    "step_rows": ("Token rows in an engine step, prefill included", ROWS),
}  # fmt: skip


class Metrics:
    """Everything that /metrics shows; implements `engine.outputs.EngineObserver`."""

    def __init__(self, prefix: str, model_name: str, keep_steps: int = 0) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        self._prefix = prefix
        self._gauges = {name: self._gauge(name, text) for name, text in _GAUGES.items()}
        self._counters = {
            name: self._counter(name, text).labels(model_name) for name, text in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(self.registry, prefix + name, text, bounds, {"model_name": model_name})
            for name, (text, bounds) in _HISTOGRAMS.items()
        }
        self._finished = self._counter("request_success", "Requests ended, by reason", "finished_reason")
        self._rejected = self._counter("admission_rejections", "Requests refused, by reason", "reason")
        self._http = self._counter("http_requests", "HTTP requests answered", "path", "status")
        self._speculation = SpecMetrics(self.registry, prefix, model_name)
        #: the last steps, for /debug/scheduler
        self.recent: deque[StepStats] = deque(maxlen=keep_steps)
        ProcessCollector(registry=self.registry)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """The text of /metrics and its content type, as OpenMetrics to whoever takes that.

        The client library's own choice would write dspark_ for dspark: to a Prometheus before version 3.
        """
        if "application/openmetrics-text" in accept:
            text: bytes = openmetrics.generate_latest(self.registry, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
            return text, _OPENMETRICS
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4

    def value(self, name: str, **labels: str) -> float | None:
        """One sample, for tests and the start line; `name` is without prefix."""
        return self.registry.get_sample_value(self._prefix + name, {"model_name": self._model, **labels})

    # What the HTTP side counts

    def http_request(self, path: str, status: int) -> None:
        self._http.labels(self._model, path, str(status)).inc()

    def rejected(self, reason: str) -> None:
        self._rejected.labels(self._model, reason).inc()

    def cancelled(self) -> None:
        self._counters["cancelled_requests"].inc()

    def now(self, step_age: float, tasks: int) -> None:
        """What only means something at the moment that somebody looks."""
        self._gauges["step_age_seconds"].set(step_age)
        self._gauges["asyncio_tasks"].set(tasks)

    def gauges(self, gauges: EngineGauges) -> None:
        own = self._gauges
        own["num_requests_running"].set(gauges.running)
        own["num_requests_waiting"].set(gauges.waiting)
        own["num_tokens_waiting"].set(gauges.queued_tokens)
        own["kv_cache_usage_perc"].set(gauges.kv_usage)
        own["kv_pages_free"].set(gauges.pages_free)
        own["kv_pages_cached"].set(gauges.pages_cached)
        own["kv_pages_total"].set(gauges.pages_total)
        self._speculation.gauges(gauges)

    # EngineObserver

    def step(self, stats: StepStats) -> None:
        counters, histograms = self._counters, self._histograms
        histograms["step_seconds"].observe(stats.step_time)
        histograms["forward_seconds"].observe(stats.forward_time)
        histograms["draft_seconds"].observe(stats.draft_time)
        histograms["step_rows"].observe(stats.rows)
        counters["generation_tokens"].inc(stats.emitted)
        if stats.corrupted:
            counters["corrupted_requests"].inc(stats.corrupted)
        self._speculation.step(stats)
        self.recent.append(stats)

    def first_token(self, seconds: float) -> None:
        self._histograms["time_to_first_token_seconds"].observe(seconds)

    def inter_token(self, seconds: float, tokens: int) -> None:
        if tokens > 0:
            self._histograms["inter_token_latency_seconds"].observe(seconds / tokens, tokens)

    def finished(self, stats: RequestStats) -> None:
        self._finished.labels(self._model, stats.finish_reason).inc()
        self._counters["prompt_tokens"].inc(stats.usage.prompt_tokens)
        self._counters["prompt_tokens_cached"].inc(stats.usage.cached_tokens)
        self._histograms["e2e_request_latency_seconds"].observe(stats.e2e)
        self._histograms["request_queue_time_seconds"].observe(stats.queue_time)

    def preempted(self) -> None:
        self._counters["num_preemptions"].inc()

    def prefix_cache(self, queried_tokens: int, hit_tokens: int) -> None:
        self._counters["prefix_cache_queries"].inc(queried_tokens)
        self._counters["prefix_cache_hits"].inc(hit_tokens)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(self._prefix + name, text, ["model_name", *labels], registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(self._prefix + name, text, ["model_name"], registry=self.registry).labels(self._model)
