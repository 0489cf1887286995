"""A server's context with what it keeps and sends about requests, as the settings ask for."""

from __future__ import annotations

from typing import Any

from server.context import ServerContext
from server.debug import MOST
from server.metrics import Metrics
from server.settings import Settings
from server.tracing import KEPT_STEPS, exporter


def observed_context(settings: Settings) -> tuple[ServerContext, Any]:
    """The context, and the provider of spans where requests are traced: the caller shuts it down.

    Raises StartError where traces cannot be sent.
    """
    keep = MOST if settings.enable_debug_endpoints else 0
    spans = None
    if settings.otlp_traces_endpoint is not None:
        keep, spans = KEPT_STEPS, exporter(settings.otlp_traces_endpoint)
    context = ServerContext(settings, Metrics(settings.metrics_prefix, settings.model_names[0], keep))
    context.tracer = spans and spans.get_tracer("dspark")
    return context, spans
