"""A clock that jumps: an event loop in which waiting costs no time, and a server that answers by plan."""

from __future__ import annotations

import asyncio
import contextlib
import json
import selectors
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest

from loadtest import client
from loadtest.connection import Exchange
from loadtest.generator import Generator, Tick
from loadtest.plan import Plan
from loadtest.record import Record


class _JumpingSelector(selectors.SelectSelector):
    now = 1000.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events and timeout != 0:
            assert timeout is not None, "everybody waits, and nobody will come"
            self.now += timeout
        return events


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


@dataclass
class VirtualServer:
    """Answers with `tokens` in chunks of `width`: the first after `prefill` seconds, then one every `gap`.

    In a stall, given as (begin, end) after the start of the run, nothing is sent. `refuse(n)` says which
    requests get a 503, `room` how many are answered at once. `begin` is set when the run begins.
    """

    prefill: float = 0.2
    gap: float = 0.05
    width: int = 1
    tokens: int = 20
    stall: tuple[float, float] | None = None
    refuse: Callable[[int], bool] = lambda number: False
    room: asyncio.Semaphore | None = None
    begin: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    generated: int = 0

    async def send(self, body: bytes, exchange: Exchange) -> None:
        asked = json.loads(body)
        number = len(self.bodies)
        self.bodies.append(asked)
        if self.refuse(number):
            exchange.status = 503
            refusal = b'{"error": {"type": "overloaded_error", "message": "full"}}'
            exchange.on_body(refusal, time.perf_counter())
            return
        exchange.status = 200
        async with self.room or contextlib.nullcontext():
            await self._answer(asked, exchange)

    async def _answer(self, asked: dict[str, Any], exchange: Exchange) -> None:
        await self._wait(self.prefill)
        total = min(self.tokens, asked["max_tokens"])
        for start in range(0, total, self.width):
            if start:
                await self._wait(self.gap)
            count = min(start + self.width, total)
            self.generated += count - start
            finish = "length" if count == total else None
            delta = {"content": "x" * (count - start)}
            event = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
            usage = {"prompt_tokens": 7, "completion_tokens": count, "total_tokens": 7 + count}
            self._write(exchange, event | {"usage": usage})
            if exchange.abandoned:
                return
        self._write(exchange, {"choices": [], "usage": usage})
        exchange.on_body(b"data: [DONE]\n\n", time.perf_counter())

    async def _wait(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if self.stall is not None:
            since = time.perf_counter() - self.begin
            if self.stall[0] <= since < self.stall[1]:
                await asyncio.sleep(self.stall[1] - since)

    @staticmethod
    def _write(exchange: Exchange, event: dict[str, Any]) -> None:
        exchange.on_body(f"data: {json.dumps(event)}\n\n".encode(), time.perf_counter())


class Virtual:
    """Runs coroutines and plans on the jumping clock, against `server`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.server = VirtualServer()
        self.records: list[Record] = []
        self.loop = VirtualLoop()
        monkeypatch.setattr(time, "perf_counter", self.loop.time)
        outer = self

        class Pool:
            def __init__(self, url: str, headers: dict[str, str]) -> None: ...

            async def exchange(
                self,
                path: str,
                body: bytes,
                on_body: Callable[[bytes, float], None],
                started: Callable[[Exchange], None],
            ) -> Exchange:
                exchange = Exchange(on_body, asyncio.get_running_loop().create_future(), time.perf_counter())
                started(exchange)
                await outer.server.send(body, exchange)
                return exchange

            def close(self) -> None: ...

        monkeypatch.setattr(client, "ConnectionPool", Pool)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def play(
        self, plan: Plan, on_tick: Callable[[Tick], bool] = lambda tick: False
    ) -> tuple[list[Record], float]:
        """(records, when the run began)"""
        records = self.records = []
        begin = self.server.begin = self.loop.time() + 1.0
        self.run(Generator(plan, 0, records.append).run(begin, on_tick))
        return records, begin
