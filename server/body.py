"""From the bytes of a request body to a checked request object, or to an error that names the field."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from server.access import IGNORED_KEY
from server.context import ServerContext
from server.disconnect import ClientGone
from server.errors import ApiError, clip, invalid
from server.unsupported import refuse_unsupported

Model = TypeVar("Model", bound=BaseModel)

# Below this size parsing takes less than handing it to a thread.
_INLINE_BYTES = 32 * 1024
_ERRORS_SHOWN = 5
_BODY_SECONDS = 60.0  # until all of it is there
_DISCARDED_BYTES, _DISCARDING_SECONDS = 64 * 1024 * 1024, 5.0


async def read(http: Request, model: type[Model], context: ServerContext) -> Model:
    """Read, parse and check the body of `http`; raises ApiError, or ClientGone.

    Fields that nobody knows are named in a header of the reply, or refused if the operator is strict.
    """
    limit = context.body_limit
    try:
        _check_headers(http.headers, limit)
        async with asyncio.timeout(_BODY_SECONDS):
            raw = await _read_bytes(http, limit)
    except TimeoutError:
        raise _too_slow() from None
    except ApiError as refusal:
        if refusal.status == 413 and "expect" not in http.headers:  # who expects has not sent anything yet
            await _discard(http)
        raise
    if len(raw) <= _INLINE_BYTES:
        checked, unknown = parse(raw, model)
    else:
        checked, unknown = await context.off_loop(parse, raw, model)
    if unknown and context.settings.strict:
        raise invalid(f"Unknown parameter: {unknown[0]}", unknown[0], "unknown_parameter")
    http.scope[IGNORED_KEY] = unknown
    return checked


def parse(raw: bytes, model: type[Model]) -> tuple[Model, list[str]]:
    """Parse JSON strictly (no NaN, no lone surrogates, bounded depth and digits) and validate it.

    Also returns the names of the fields that nobody knows.
    """
    try:
        value = from_json(raw, allow_inf_nan=False)
    except ValueError as exc:
        raise invalid(f"The body is not valid JSON: {exc}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid("The body must be a JSON object.", code="invalid_json")
    fields, unknown = refuse_unsupported(value, model)
    try:
        return model.model_validate(fields), unknown
    except ValidationError as exc:
        raise _explain(exc) from None


def _check_headers(headers: Mapping[str, str], limit: int) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(
            415,
            "The Content-Type must be application/json.",
            param="Content-Type",
            code="unsupported_media_type",
        )
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(
            415,
            "Compressed bodies are not accepted.",
            param="Content-Encoding",
            code="unsupported_media_type",
        )
    length = headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > limit:
        raise _too_large(limit)


async def _read_bytes(http: Request, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await http.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
        if not message.get("more_body", False):
            return b"".join(chunks)


async def _discard(http: Request) -> None:
    """Take what still comes of a refused body, within bounds.

    A connection that is closed on unread bytes is reset, and a proxy in between would tell of a bad gateway.
    """
    left = _DISCARDED_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(_DISCARDING_SECONDS):
            while left > 0:
                message = await http.receive()
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
                left -= len(message.get("body", b""))


def _too_large(limit: int) -> ApiError:
    # Not all of the rest may have been read, so the connection cannot serve another request.
    return ApiError(
        413,
        f"The body is larger than the {limit} bytes that this server accepts.",
        code="request_too_large",
        headers={"Connection": "close"},
    )


def _too_slow() -> ApiError:
    return ApiError(
        408,
        f"The body did not arrive within {_BODY_SECONDS:g} seconds.",
        code="request_timeout",
        headers={"Connection": "close"},
    )


def _explain(exc: ValidationError) -> ApiError:
    errors = exc.errors(include_url=False, include_context=False, include_input=False)
    shown = [_sentence(error) for error in errors[:_ERRORS_SHOWN]]
    if len(errors) > _ERRORS_SHOWN:
        shown.append(f"and {len(errors) - _ERRORS_SHOWN} more")
    return invalid("; ".join(shown), _path(errors[0]) or None, _code(errors[0]["type"]))


def _sentence(error: ErrorDetails) -> str:
    path = _path(error)
    return f"{path}: {clip(error['msg'], 200)}" if path else clip(error["msg"], 200)


def _path(error: ErrorDetails) -> str:
    """("messages", 0, "content") as messages[0].content."""
    path = ""
    for part in error["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{clip(part, 40)}" if path else clip(part, 40)
    return path


def _code(kind: str) -> str:
    if kind == "missing":
        return "missing_required_parameter"
    if kind == "extra_forbidden":
        return "unknown_parameter"
    return "invalid_type" if kind.endswith("_type") else "invalid_value"
