"""Noticing that a client has left, while its work is under way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope

Result = TypeVar("Result")

GONE_KEY = "dspark.client_gone"


class ClientGone(Exception):
    """The client closed the connection before its reply was complete."""


def gone_response(scope: Scope) -> Response:
    """Marks the request for log and metrics; nobody will read the reply itself."""
    scope[GONE_KEY] = True
    return Response(status_code=499)


async def unless_gone(
    receive: Receive,
    work: Coroutine[None, None, Result],
    on_idle: Callable[[], Awaitable[None]] | None = None,
    interval: float = 0.0,
) -> Result:
    """Run `work`, but cancel it and raise ClientGone as soon as the client leaves.

    The request body must have been read. `on_idle` is called every `interval` seconds (never if 0).
    """
    task = asyncio.ensure_future(work)
    listener = asyncio.ensure_future(_until_gone(receive))
    try:
        while True:
            await asyncio.wait(
                {task, listener}, timeout=interval or None, return_when=asyncio.FIRST_COMPLETED
            )
            if task.done():
                return task.result()
            if listener.done():
                raise ClientGone
            if on_idle is not None:
                await on_idle()
    finally:
        task.cancel()
        listener.cancel()
        await asyncio.gather(task, listener, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
