"""GET /v1/models: the names under which the one model is served."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from server.context import ServerContext


def routes(context: ServerContext) -> APIRouter:
    """The endpoints, bound to `context`."""
    router = APIRouter(tags=["models"])

    def describe(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": context.started_at,
            "owned_by": "dspark-server",
            "root": context.settings.model_names[0],
            "max_model_len": context.loaded().max_model_len,
        }

    @router.get("/v1/models")
    async def list_models() -> dict[str, Any]:
        """All names."""
        return {"object": "list", "data": [describe(name) for name in context.settings.model_names]}

    @router.get("/v1/models/{model:path}")
    async def retrieve_model(model: str) -> dict[str, Any]:
        """One name."""
        return describe(context.check_model(model))

    return router
