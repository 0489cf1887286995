"""Server-sent events over plain ASGI: headers with the first event, comments in silence, errors in band."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from server.disconnect import GONE_KEY, ClientGone, unless_gone
from server.errors import ApiError, internal

logger = logging.getLogger("dspark")

DONE = b"data: [DONE]\n\n"
_PING = b": keep-alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def dumps(value: Any) -> str:
    """Compact JSON in ASCII: some clients split lines at characters that JSON would leave as they are."""
    return json.dumps(value, separators=(",", ":"))


def event(data: str) -> bytes:
    """One event. `data` must hold no line break, which compact JSON never does."""
    return f"data: {data}\n\n".encode()


def failure_event(failure: ApiError) -> bytes:
    """A failure in the middle of a stream."""
    return event(dumps(failure.body()))


class EventStream(Response):
    """Sends what `events` yields, then `end`.

    The status line waits for the first event, so that a failure before it is an ordinary error reply.
    `close` is called at the end, however it comes about; `failed` writes a failure behind the first event.
    """

    def __init__(
        self,
        events: AsyncIterator[bytes],
        close: Callable[[], None],
        keep_alive: float,
        failed: Callable[[ApiError], bytes] = failure_event,
        end: bytes = DONE,
    ) -> None:
        super().__init__()
        self._events = events
        self._close = close
        self._keep_alive = keep_alive
        self._failed = failed
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = _Writer(send, self._keep_alive)
        try:
            failure = await unless_gone(receive, self._pump(writer), writer.ping, self._keep_alive)
            if failure is not None:
                await failure.response()(scope, receive, send)
        except ClientGone:
            scope[GONE_KEY] = True
        finally:
            self._close()

    async def _pump(self, writer: _Writer) -> ApiError | None:
        """Returns the failure that came before anything was sent, if one did."""
        try:
            async for data in self._events:
                await writer.write(data)
                # Neither side waits if much has piled up for a slow reader; others want their turn.
                await asyncio.sleep(0)
        except Exception as exc:
            if isinstance(exc, ApiError):
                failure = exc
            else:
                logger.exception("a stream failed")
                failure = internal()
            if not writer.started:
                return failure
            await writer.write(self._failed(failure))
        await writer.write(self._end, last=True)
        return None


class _Writer:
    """Sends the head of the reply before its first bytes, and knows when it was last heard of."""

    def __init__(self, send: Send, interval: float) -> None:
        self._send = send
        self._interval = interval
        self._busy = False
        self._written_at = time.monotonic()
        self.started = False

    async def write(self, data: bytes, last: bool = False) -> None:
        self._busy = True
        try:
            if not self.started:
                self.started = True
                await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        finally:
            self._busy = False
            self._written_at = time.monotonic()

    async def ping(self) -> None:
        """A comment, unless something was written lately or is stuck in being written."""
        if not self._busy and time.monotonic() - self._written_at >= self._interval * 0.9:
            await self.write(_PING)
