"""Connections over real sockets, with servers that misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from loadtest.client import Client, Target
from loadtest.connection import ConnectionFailed, ConnectionPool, Exchange
from loadtest.record import Record
from tests.loadtest.stub import Stub

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def serving(handler: Handler) -> tuple[asyncio.Server, ConnectionPool]:
    server = await asyncio.start_server(handler, "127.0.0.1", 0)
    return server, ConnectionPool(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base")


async def post(pool: ConnectionPool) -> tuple[Exchange, bytes]:
    pieces: list[bytes] = []
    exchange = await pool.exchange(
        "/path", b"{}", lambda piece, now: pieces.append(piece), lambda exchange: None
    )
    return exchange, b"".join(pieces)


async def test_request_and_reply() -> None:
    seen = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"{}"))
        for piece in (
            b"HTTP/1.1 201 Made\r\nTransfer-",
            b"Encoding: chunked\r\n\r\n3\r\nab",
            b"c\r\n0\r\n\r\n",
        ):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)

    server, pool = await serving(handler)
    exchange, body = await post(pool)
    assert (exchange.status, body) == (201, b"abc")
    assert seen[0].startswith(b"POST /base/path HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"Content-Length: 2\r\n" in seen[0]
    pool.close()
    server.close()


async def test_an_idle_connection_that_the_server_closed_is_replaced() -> None:
    answered = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal answered
        await reader.readuntil(b"{}")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        answered += 1
        await reader.readuntil(b"{}")  # takes the second request and closes without a word
        writer.close()

    server, pool = await serving(handler)
    assert (await post(pool))[1] == b"ok"
    assert (await post(pool))[1] == b"ok"
    assert answered == 2
    server.close()


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (b"", "closed before the reply was complete"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "closed before the reply was complete"),
        (b"garbage\r\n\r\n", "malformed HTTP reply"),
    ],
)
async def test_broken_replies(reply: bytes, message: str) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"{}")
        writer.write(reply)
        writer.close()

    server, pool = await serving(handler)
    with pytest.raises(ConnectionFailed, match=message):
        await post(pool)
    server.close()


async def test_nobody_listens() -> None:
    with pytest.raises(ConnectionFailed, match="refused"):
        await post(ConnectionPool("http://127.0.0.1:1"))


@pytest.mark.parametrize("url", ["ftp://x", "127.0.0.1:80", "http://"])
def test_bad_addresses(url: str) -> None:
    with pytest.raises(ValueError, match="address"):
        ConnectionPool(url)


async def send(client: Client, cancel_at: int | None = None) -> Record:
    record = Record("x")
    await client.send("chat", {"messages": [], "max_tokens": 50}, record, cancel_at)
    return record


async def test_connections_are_kept_and_hanging_up_reaches_the_server(stub: Callable[..., Stub]) -> None:
    server = stub(tokens=20, gap=0.01)
    client = Client(Target(server.url + "/v1", "stub"))
    assert (await send(client)).ok
    assert (await send(client)).ok
    assert server.connections == 1
    record = await send(client, cancel_at=3)
    assert record.outcome == "cancelled"
    assert 3 <= record.tokens < 20
    for _ in range(200):
        if server.hung_up:
            break
        await asyncio.sleep(0.01)
    assert server.hung_up == 1
    assert record.tokens <= server.generated - 40
    client.close()


async def test_a_reply_that_takes_too_long(stub: Callable[..., Stub]) -> None:
    client = Client(Target(stub(prefill=5.0).url, "stub", timeout=0.05))
    record = await send(client)
    assert (record.outcome, record.error) == ("error", "no complete reply in 0.05 s")


async def test_a_cancelled_sender_leaves_an_unfinished_record(stub: Callable[..., Stub]) -> None:
    client, record = Client(Target(stub(prefill=5.0).url, "stub")), Record("x")
    task = asyncio.create_task(client.send("chat", {"messages": [], "max_tokens": 5}, record))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert record.outcome == "unfinished"
    assert record.ended is not None
