"""The application: endpoints, error shapes and middleware around one ServerContext."""

from __future__ import annotations

from importlib import metadata

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from server import chat, completions, debug, errors, health, models, openapi, page, responses, tokenize
from server.access import IGNORED_HEADER, AccessLog
from server.auth import ApiKeys
from server.context import ServerContext
from server.limits import KeyLimits
from server.protocol import ChatRequest, CompletionRequest
from server.responses_protocol import ResponsesRequest
from server.root_path import RootPath
from server.tokenize import DetokenizeRequest, TokenizeRequest
from server.tracing import Tracing

_BODIES = (CompletionRequest, ChatRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest)
_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/health",
    "/ready",
    "/metrics",
    "/debug/scheduler",
    "/version",
    "/docs",
    "/openapi.json",
    *page.PATHS,
)


def create_app(context: ServerContext) -> ASGIApp:
    """An ASGI application. Whoever runs it sets `context.engine` and decides when to drain."""
    settings = context.settings
    app = FastAPI(
        title="dspark-server",
        version=metadata.version("dspark-server"),
        redoc_url=None,
        redirect_slashes=False,
    )
    for endpoint in (completions, chat, responses, tokenize, models, health):
        app.include_router(endpoint.routes(context))
    if settings.enable_playground:
        app.include_router(page.routes())
    if settings.enable_debug_endpoints:
        app.include_router(debug.routes(context))
    errors.install(app)
    openapi.install(app, _BODIES)
    outer: ASGIApp = app
    if settings.key_rate_limit or settings.key_concurrency_limit:
        limits = settings.key_rate_limit, settings.key_concurrency_limit
        outer = KeyLimits(outer, context.metrics, *limits, keyed=bool(settings.api_keys))
    if context.tracer is not None:
        outer = Tracing(outer, context.tracer, context.metrics.recent)
    if settings.api_keys:
        outer = ApiKeys(outer, settings.api_keys)
    if settings.allowed_origins:  # outside of the keys, since a browser asks first, and without one
        outer = CORSMiddleware(
            outer,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", IGNORED_HEADER, "Retry-After"],
        )
    outer = AccessLog(outer, context, _PATHS)
    return RootPath(outer, settings.root_path) if settings.root_path else outer
