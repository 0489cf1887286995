"""uvicorn's HTTP/1.1 over httptools, which by itself would gather a head, and wait for it, without end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from server.errors import ApiError

#: bytes of request line and headers, and of what else is no body: trailers, marks of chunks
HEAD_LIMIT = 64 * 1024
#: from a connection, or a request's first byte, to the end of its head
HEAD_SECONDS = 30.0


class BoundedHttp(HttpToolsProtocol):
    """Refuses what is not HTTP with 400 and a head beyond the limit with 431, in OpenAI's shape.

    A connection on which no head comes to its end in time is closed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._open = False  # a request has begun and is not yet whole
        self._moved = False  # it has begun, or brought body, in this read
        self._head_bytes = 0  # since then
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._moved = False
        super().data_received(data)
        if self._open and not self._moved:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_LIMIT and not self.transport.is_closing():
                self.send_400_response("")
        # Bytes behind a reply end its keep-alive, whether they begin another request or not.
        idle = self.cycle is not None and self.cycle.response_complete and not self.transport.is_closing()
        if idle and self._head_timer is None and self.timeout_keep_alive_task is None:
            self._await_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._open = self._moved = True
        self._head_bytes = 0
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._head_came()
        # It may have come whole, in a single read.
        self._head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if self._head_bytes > HEAD_LIMIT:
            raise ValueError("the head is too large")
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._moved = True
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._open = False
        super().on_message_complete()

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS, self._too_slow)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._await_head()  # an earlier request is still being answered
        elif not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Also called when a callback above raises."""
        if self._head_bytes > HEAD_LIMIT:
            error = ApiError(
                431, f"The request's head exceeds {HEAD_LIMIT} bytes.", code="request_header_too_large"
            )
        else:
            error = ApiError(400, "This is not a valid HTTP/1.1 request.", code="invalid_http")
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()  # in the middle of another reply
            return
        body = json.dumps(error.body()).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(
            body
        )
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
