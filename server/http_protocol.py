"""uvicorn's HTTP/1.1 over httptools, which by itself would gather the head of a request without end."""

from __future__ import annotations

import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from server.errors import ApiError

#: bytes of request line and headers
HEAD_LIMIT = 64 * 1024


class BoundedHttp(HttpToolsProtocol):
    """Refuses what is not HTTP with 400 and a head beyond the limit with 431, in OpenAI's shape."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_open = False
        self._head_bytes = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_open:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_LIMIT and not self.transport.is_closing():
                self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_open = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._head_open = False
        # It may have come whole, in a single read.
        self._head_bytes = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if self._head_bytes > HEAD_LIMIT:
            raise ValueError("the head is too large")
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Also called when a callback above raises."""
        if self._head_bytes > HEAD_LIMIT:
            error = ApiError(
                431, f"The request's head exceeds {HEAD_LIMIT} bytes.", code="request_header_too_large"
            )
        else:
            error = ApiError(400, "This is not a valid HTTP/1.1 request.", code="invalid_http")
        body = json.dumps(error.body()).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(
            body
        )
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.close()
