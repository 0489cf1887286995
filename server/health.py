"""Probes, metrics and version: cheap enough to answer under full load."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from server.context import ServerContext
from server.versions import versions


def routes(context: ServerContext) -> APIRouter:
    """The endpoints, bound to `context`."""
    router = APIRouter(tags=["operations"])

    @router.head("/health", include_in_schema=False)
    @router.get("/health")
    async def health() -> Response:
        """Liveness: 503 only when a restart is the remedy."""
        if context.engine is not None and context.engine.state == "dead":
            return JSONResponse({"status": "dead"}, 503)
        return JSONResponse({"status": "ok"})

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready")
    async def ready() -> Response:
        """Readiness: 503 while traffic should go elsewhere, with the reason."""
        reason = context.unready()
        if reason is not None:
            return JSONResponse({"status": "unready", "reason": reason}, 503)
        return JSONResponse({"status": "ready"})

    @router.get("/metrics")
    async def metrics(http: Request) -> Response:
        """Prometheus exposition."""
        if context.engine is not None:
            context.metrics.gauges(context.engine.gauges())
            context.metrics.now(context.engine.step_age(), len(asyncio.all_tasks()))
        content, content_type = context.metrics.exposition(http.headers.get("accept", ""))
        return Response(content, headers={"Content-Type": content_type})

    @router.get("/version")
    async def version() -> dict[str, Any]:
        """Versions, and how the engine is set up (null while the model loads)."""
        info = None if context.engine is None else dict(context.engine.info)
        return {"version": versions()["dspark-server"], "versions": versions(), "engine": info}

    return router
