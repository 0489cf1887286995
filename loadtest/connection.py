"""HTTP/1.1 connections made for streams: one callback a read, nothing between the socket and the clock.

A general client spends most of a core on a few thousand streamed chunks a second, which would be taken for
the server's slowness. This one reads through httptools and stamps every read as it arrives.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools


class ConnectionFailed(Exception):
    """The connection broke or never came about; the message is a short kind, fit for counting."""


@dataclass(slots=True)
class Exchange:
    """A request under way: the status as soon as it is known, the body handed on as it arrives."""

    on_body: Callable[[bytes, float], None]
    done: asyncio.Future[None]
    sent: float = 0.0
    status: int = 0
    #: whether any byte of a reply has come
    begun: bool = False
    abandoned: bool = False

    def hang_up(self) -> None:
        """Have enough of the reply."""
        self.abandoned = True
        if not self.done.done():
            self.done.set_result(None)


class Connection(asyncio.Protocol):
    """One connection, one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._arrived = 0.0
        self.used = False
        self.reusable = True

    @property
    def alive(self) -> bool:
        return self.reusable and self._transport is not None and not self._transport.is_closing()

    def send(self, request: bytes, exchange: Exchange) -> None:
        """Write a request, whose reply goes to `exchange`."""
        assert self._transport is not None
        self._exchange = exchange
        exchange.sent = time.perf_counter()
        self._transport.write(request)

    def abort(self) -> None:
        """Hang up at once."""
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance

    def data_received(self, data: bytes) -> None:
        self._arrived = time.perf_counter()
        exchange = self._exchange
        if exchange is None:  # nobody asked
            self.abort()
            return
        exchange.begun = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._fail("malformed HTTP reply")

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._exchange is not None:
            self._fail("connection closed before the reply was complete")

    # httptools' callbacks

    def on_headers_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None and not self._exchange.abandoned:
            self._exchange.on_body(body, self._arrived)

    def on_message_complete(self) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        self.used = True
        self.reusable = self._parser.should_keep_alive()
        self._parser = httptools.HttpResponseParser(self)
        if not exchange.done.done():
            exchange.done.set_result(None)

    def _fail(self, message: str) -> None:
        exchange, self._exchange = self._exchange, None
        self.abort()
        if exchange is not None and not exchange.done.done():
            exchange.done.set_exception(ConnectionFailed(message))


class ConnectionPool:
    """As many connections to one server as requests in flight, kept open between requests."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http:// or https:// address")
        secure = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if secure else 80)
        self._ssl = ssl.create_default_context() if secure else None
        self._path = parts.path.rstrip("/")
        fixed = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json"}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in (fixed | (headers or {})).items())
        self._idle: list[Connection] = []

    async def exchange(
        self,
        path: str,
        body: bytes,
        on_body: Callable[[bytes, float], None],
        started: Callable[[Exchange], None],
    ) -> Exchange:
        """POST `body` and hand the reply's body to `on_body`, with the time of each read.

        `started` gets the exchange before anything is sent. Cancelling hangs up. A connection that the
        server had closed while it was idle is replaced once. Raises ConnectionFailed.
        """
        head = f"POST {self._path}{path} HTTP/1.1\r\n{self._head}Content-Length: {len(body)}\r\n\r\n"
        request = head.encode("latin-1") + body
        while True:
            connection = await self._take()
            exchange = Exchange(on_body, asyncio.get_running_loop().create_future())
            started(exchange)
            connection.send(request, exchange)
            try:
                await exchange.done
            except ConnectionFailed:
                if connection.used and not exchange.begun:
                    continue
                raise
            finally:
                if exchange.abandoned or exchange.done.cancelled():
                    connection.abort()
            if connection.alive:
                self._idle.append(connection)
            return exchange

    def close(self) -> None:
        """Hang up all idle connections."""
        while self._idle:
            self._idle.pop().abort()

    async def _take(self) -> Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.alive:
                return connection
        loop = asyncio.get_running_loop()
        try:
            _, fresh = await loop.create_connection(Connection, self._host, self._port, ssl=self._ssl)
        except ConnectionRefusedError:
            raise ConnectionFailed("connection refused") from None
        except OSError as error:
            raise ConnectionFailed(f"cannot connect: {error.strerror or type(error).__name__}") from None
        return fresh
