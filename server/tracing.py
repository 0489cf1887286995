"""OpenTelemetry: a span for each request for text, and below it what its time went to.

    POST /v1/chat/completions          continues the client's trace (W3C traceparent)
      queue, prefill, decode           one of each for every prompt of the request
        round                          a step of the engine while it decoded, the latest ones that are kept
          select, verify, draft        before the forward pass; the pass and the decision; the next drafts

Made when a request has ended, from figures that are counted anyway: nothing is measured for it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.async_engine import RequestStream
from engine.outputs import RequestStats, StepStats
from server.startup import StartError

#: steps that are kept for the rounds of requests that end
KEPT_STEPS = 2048


@dataclass(slots=True)
class _Noted:
    streams: list[tuple[int, RequestStream]] = field(default_factory=list)  # arrival in ns since 1970


_NOTED: ContextVar[_Noted | None] = ContextVar("noted", default=None)


def note(streams: Iterable[RequestStream]) -> None:
    """Engine requests that belong to the HTTP request under way; does nothing where that is not traced."""
    noted = _NOTED.get()
    if noted is not None:
        noted.streams += [(time.time_ns(), stream) for stream in streams]


class Tracing:
    """ASGI middleware around the API; `tracer` is OpenTelemetry's, `steps` are the engine's latest."""

    def __init__(self, app: ASGIApp, tracer: Any, steps: Iterable[StepStats]) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._app = app
        self._tracer = tracer
        self._propagator = TraceContextTextMapPropagator()
        self._steps = steps

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        noted, begun, status = _Noted(), time.time_ns(), 500
        token = _NOTED.set(noted)

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, observed)
        finally:
            _NOTED.reset(token)
            if noted.streams:
                self._tell(scope, begun, status, noted)

    def _tell(self, scope: Scope, begun: int, status: int, noted: _Noted) -> None:
        parent = self._propagator.extract(dict(Headers(scope=scope)))
        attributes = {
            "http.request.method": "POST",
            "http.response.status_code": status,
            "url.path": scope["path"],
        }
        span = self._begin(f"POST {scope['path']}", begun, parent, attributes, server=True)
        for arrived, stream in noted.streams if span.is_recording() else []:
            self._request(_within(span), arrived, stream.stats)
        span.end()

    def _request(self, parent: Any, arrived: int, stats: RequestStats) -> None:
        def at(seconds: float) -> int:
            return arrived + round(1e9 * seconds)

        usage = stats.usage
        self._span("queue", arrived, at(stats.queue_time), parent, {"dspark.preemptions": stats.preemptions})
        if stats.ttft is None:
            return
        prompt = {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "dspark.cached_tokens": usage.cached_tokens,
        }
        self._span("prefill", at(stats.queue_time), at(stats.ttft), parent, prompt)
        written = {
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "dspark.draft_tokens": usage.draft_tokens,
            "dspark.accepted_tokens": usage.accepted_tokens,
        }
        decode = self._begin("decode", at(stats.ttft), parent, written)
        self._rounds(_within(decode), at(stats.ttft), at(stats.e2e))
        decode.end(at(stats.e2e))

    def _rounds(self, parent: Any, begun: int, ended: int) -> None:
        shift = time.time_ns() - time.perf_counter_ns()
        for step in self._steps:
            first, last = _ns(step.begun) + shift, _ns(step.begun + step.step_time) + shift
            if last <= begun or first >= ended:
                continue
            figures = {"dspark.rows": step.rows, "dspark.verified": sum(step.verified)}
            figures["dspark.accepted"] = sum(step.accepted)
            round_span = self._begin("round", first, parent, figures)
            inside = _within(round_span)
            worker = _ns(step.worker_begun) + shift
            drafting = worker + _ns(step.forward_time + step.verify_time)
            self._span("select", first, first + _ns(step.latch_time), inside)
            self._span("verify", worker, drafting, inside)
            self._span("draft", drafting, drafting + _ns(step.draft_time), inside)
            round_span.end(last)

    def _span(self, name: str, begun: int, ended: int, parent: Any, attributes: Any = None) -> None:
        self._begin(name, begun, parent, attributes).end(ended)

    def _begin(self, name: str, begun: int, parent: Any, attributes: Any, server: bool = False) -> Any:
        from opentelemetry.trace import SpanKind

        kind = SpanKind.SERVER if server else SpanKind.INTERNAL
        return self._tracer.start_span(name, parent, kind, attributes, start_time=begun)


def _within(span: Any) -> Any:
    from opentelemetry.trace import set_span_in_context

    return set_span_in_context(span)


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)


def exporter(endpoint: str) -> Any:
    """A provider that sends spans to an OTLP collector over HTTP; the caller shuts it down.

    The standard OTEL_... variables say the rest: sampling, headers, service name. Raises StartError.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as exc:
        raise StartError(
            f"--otlp-traces-endpoint needs OpenTelemetry (pip install 'dspark-server[otel]'): {exc}"
        ) from None
    named = {SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "dspark-server")}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return provider
