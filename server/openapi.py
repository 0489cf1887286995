"""Request schemas for /docs: the endpoints parse their bodies themselves, so FastAPI sees no models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/{model}"


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """What a route declares so that its documentation shows `model`."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install(app: FastAPI, bodies: Sequence[type[BaseModel]]) -> None:
    """Add the schemas of request bodies to the document that `app` generates."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, models = models_json_schema([(body, "validation") for body in bodies], ref_template=_REF)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(models["$defs"])
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
