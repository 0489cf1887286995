"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}} and a status."""

from __future__ import annotations

import json
import logging
import math
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from engine.async_engine import Draining, EngineDead, QueueFull
from engine.params import ParamError
from server.disconnect import ClientGone, gone_response

logger = logging.getLogger("dspark")

# Whatever a client sends, the reply stays far below 10 kB: JSON may need 12 bytes for one character.
_MESSAGE_LIMIT = 500
_PARAM_LIMIT = 100


class ApiError(Exception):
    """An answer other than success. Raised anywhere before (or during) a reply; knows its own wire form."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = clip(message, _MESSAGE_LIMIT)
        self.param = clip(param, _PARAM_LIMIT) if param is not None else None
        self.code = code
        self.kind = kind or ("invalid_request_error" if status < 500 else "server_error")
        self.headers = headers

    def body(self) -> dict[str, Any]:
        """The JSON body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole HTTP reply."""
        content = json.dumps(self.body(), separators=(",", ":"))
        return Response(content, self.status, headers=self.headers, media_type="application/json")


def clip(text: str, limit: int) -> str:
    """`text`, cut to `limit` characters with a sign of the cut."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def invalid(message: str, param: str | None = None, code: str | None = "invalid_value") -> ApiError:
    """A request that must be changed before it is sent again."""
    return ApiError(400, message, param=param, code=code)


def overloaded(message: str, retry_after: float, code: str = "server_overloaded") -> ApiError:
    """A request that may be sent again, here after `retry_after` seconds or to another replica at once."""
    headers = {"Retry-After": str(max(1, math.ceil(retry_after)))}
    return ApiError(503, message, code=code, kind="service_unavailable_error", headers=headers)


def too_many(message: str, retry_after: float) -> ApiError:
    """A request that this client may send again in `retry_after` seconds, to whichever replica."""
    headers = {"Retry-After": str(max(1, math.ceil(retry_after)))}
    return ApiError(429, message, code="rate_limit_exceeded", kind="rate_limit_error", headers=headers)


def shutting_down() -> ApiError:
    """What new requests hear while the server drains, and the accepted ones that outlast its patience."""
    return overloaded("The server is shutting down.", 1.0, code="server_shutting_down")


def timed_out() -> ApiError:
    """What --request-timeout leaves of a request."""
    return ApiError(504, "The request took longer than this server allows.", code="request_timeout")


def internal(
    message: str = "The server failed to answer this request.", code: str = "internal_error"
) -> ApiError:
    """Our fault."""
    return ApiError(500, message, code=code)


def translate(exc: Exception, rename: dict[str, str] | None = None) -> ApiError:
    """The wire form of what the engine raises; `rename` maps its parameter names to the endpoint's."""
    if isinstance(exc, ApiError):
        return exc
    if isinstance(exc, ParamError):
        param = (rename or {}).get(exc.param, exc.param)
        return invalid(str(exc), param, getattr(exc, "code", None) or "invalid_value")
    if isinstance(exc, QueueFull):
        return overloaded(f"The request queue is full: {exc}. Try again later.", exc.retry_after)
    if isinstance(exc, Draining):
        return shutting_down()
    if isinstance(exc, EngineDead):
        return internal("The inference engine has died; the server must be restarted.", "engine_dead")
    logger.error("unexpected failure", exc_info=exc)
    return internal()


def install(app: FastAPI) -> None:
    """Make `app` answer every failure in this shape, also those of the framework itself."""

    async def on_api_error(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, ApiError)
        return exc.response()

    async def on_http_exception(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, HTTPException)
        path = clip(request.url.path, 200)
        if exc.status_code == 404:
            error = ApiError(404, f"There is no {path} here.", code="not_found")
        elif exc.status_code == 405:
            error = ApiError(405, f"{request.method} is not allowed on {path}.", code="method_not_allowed")
        else:
            error = ApiError(exc.status_code, str(exc.detail))
        return JSONResponse(error.body(), error.status, headers=exc.headers)

    async def on_wrong_query(request: Request, exc: Exception) -> Response:
        assert isinstance(exc, RequestValidationError)
        error = exc.errors()[0]
        name = str(error["loc"][-1])
        return invalid(f"{name}: {error['msg'][:1].lower()}{error['msg'][1:]}.", name).response()

    async def on_bug(request: Request, exc: Exception) -> Response:
        return internal().response()

    async def on_client_gone(request: Request, exc: Exception) -> Response:
        return gone_response(request.scope)

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(ClientGone, on_client_gone)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(RequestValidationError, on_wrong_query)
    app.add_exception_handler(Exception, on_bug)
