"""The application: endpoints, error shapes and middleware around one ServerContext."""

from __future__ import annotations

from importlib import metadata

from fastapi import FastAPI
from starlette.types import ASGIApp

from server import chat, completions, debug, errors, health, models, openapi
from server.access import AccessLog
from server.auth import ApiKeys
from server.context import ServerContext

_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/health",
    "/ready",
    "/metrics",
    "/debug/scheduler",
    "/version",
    "/docs",
    "/openapi.json",
)


def create_app(context: ServerContext) -> ASGIApp:
    """An ASGI application. Whoever runs it sets `context.engine` and decides when to drain."""
    app = FastAPI(
        title="dspark-server",
        version=metadata.version("dspark-server"),
        redoc_url=None,
        redirect_slashes=False,
    )
    for endpoint in (completions, chat, models, health):
        app.include_router(endpoint.routes(context))
    if context.settings.enable_debug_endpoints:
        app.include_router(debug.routes(context))
    errors.install(app)
    openapi.install(app)
    guarded: ASGIApp = ApiKeys(app, context.settings.api_key) if context.settings.api_key else app
    return AccessLog(guarded, context, _PATHS)
