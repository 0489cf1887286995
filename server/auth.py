"""API keys, if the operator has set any: they guard what costs work, and leave probes and metrics open."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ApiError

GUARDED = ("/v1", "/tokenize", "/detokenize")


class ApiKeys:
    """ASGI middleware that lets only requests with a known bearer token pass to the guarded paths."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "http"
            and scope["path"].startswith(GUARDED)
            and not self._allowed(Headers(scope=scope))
        ):
            error = ApiError(
                401,
                "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                kind="authentication_error",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, headers: Headers) -> bool:
        given = bearer_token(headers).encode()
        # Every key is compared, in constant time, so that timing tells nothing about any of them.
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        return any(matches)


def bearer_token(headers: Headers) -> str:
    """What a request shows as its key, however it is spelt; empty if nothing."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
