"""One log line and one count for every HTTP request, whatever becomes of it, and the request id header."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Collection, Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.context import ServerContext
from server.disconnect import GONE_KEY

logger = logging.getLogger("dspark.access")

_QUIET = frozenset({"/health", "/ready", "/metrics"})
_SAFE_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)

IGNORED_HEADER = "X-Ignored-Fields"
IGNORED_KEY = "dspark.ignored_fields"


class AccessLog:
    """ASGI middleware, the outermost one. Plain ASGI: anything richer hides the client's leaving."""

    def __init__(self, app: ASGIApp, context: ServerContext, paths: Collection[str]) -> None:
        self._app = app
        self._context = context
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        settings = self._context.settings
        begin = time.perf_counter()
        status = 500
        named = settings.enable_request_id_headers or settings.log_format == "json"
        request_id = _request_id(scope) if named else None

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ignored = scope.get(IGNORED_KEY)
                if ignored:
                    message["headers"] = [
                        *message["headers"],
                        (IGNORED_HEADER.lower().encode(), _listed(ignored)),
                    ]
                if request_id is not None and settings.enable_request_id_headers:
                    message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, observed)
        finally:
            if scope.get(GONE_KEY):
                status = 499
                self._context.metrics.cancelled()
            path = scope["path"]
            self._context.metrics.http_request(self._label(path), status)
            if settings.enable_access_log and path not in _QUIET:
                _log(scope, status, time.perf_counter() - begin, request_id)

    def _label(self, path: str) -> str:
        """The path as a metric label: of bounded number, whatever clients ask for."""
        if path.startswith("/v1/models/"):
            return "/v1/models/{model}"
        return path if path in self._paths else "other"


def _log(scope: Scope, status: int, seconds: float, request_id: str | None) -> None:
    fields = {
        "client": (scope.get("client") or ("-", 0))[0],
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": status,
        "seconds": round(seconds, 3),
    }
    # %r keeps line breaks that a client puts into a path out of the log.
    text, values = "%s %s %r %d %.3fs", tuple(fields.values())
    if request_id is not None:
        fields["request_id"] = request_id
        text, values = text + " id=%s", (*values, request_id)
    logger.info(text, *values, extra={"fields": fields})


def _request_id(scope: Scope) -> str:
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _SAFE_ID.fullmatch(given) else uuid.uuid4().hex


def _listed(names: Sequence[str]) -> bytes:
    """For a header: a few names, cut short, without anything that a header cannot hold."""
    shown = [re.sub(r"[^\w.-]", "?", name[:60], flags=re.ASCII) for name in names[:20]]
    return ", ".join(shown + ["..."] * (len(names) > 20)).encode()
