"""Makes the load: users in a closed loop, arrivals in an open one, probes beside both."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.arrivals import OpenLoop
from loadtest.client import Client
from loadtest.plan import Plan
from loadtest.record import Record
from loadtest.scenario import LoadOver, User, load_scenario, tasks_of
from loadtest.workload import SessionUser, workload_user

#: a closed-loop user who met an error waits so long: a server that refuses at once is not hammered
ERROR_PAUSE = 1.0
_HEARTBEAT = 0.05


@dataclass(frozen=True, slots=True)
class Tick:
    """How it stands in one process: `lag` is by how much the event loop overslept at worst since the last."""

    time: float
    in_flight: int
    users: int
    started: int
    lag: float


class Generator:
    """One process's share of a plan; the `Sender` of its users."""

    def __init__(self, plan: Plan, process: int, sink: Callable[[Record], None]) -> None:
        self._plan = plan
        self._process = process
        self._sink = sink
        self._client = Client(plan.target)
        self._over = asyncio.Event()
        # Arrivals of an open loop are counted by the plan: each is a conversation, whole.
        self._budget = plan.share(plan.requests, process) if plan.closed else None
        limit = plan.share(plan.max_in_flight, process)
        self._room = None if limit is None else asyncio.Semaphore(max(1, limit))
        self._running: set[asyncio.Task[None]] = set()
        self._in_flight = self._users = self._started = self._due = 0
        self._end = float("inf")  # of the time in which what is due is measured
        self._lag = 0.0
        if plan.scenario is None:
            self._classes: list[type[User]] = [workload_user(plan.workload, f"{plan.seed}.{process}")]
        else:
            self._classes = load_scenario(Path(plan.scenario))

    async def run(self, begin: float, on_tick: Callable[[Tick], bool]) -> None:
        """Send from `begin` (of the clock) until the plan is done; `on_tick` returning true ends it early."""
        length = self._plan.length
        self._end = begin + length if length is not None else float("inf")
        deadline = self._end + self._plan.drain
        heart = asyncio.create_task(self._beat(on_tick))
        source = asyncio.create_task(self._closed(begin) if self._plan.closed else self._open(begin))
        side = [asyncio.create_task(self._probes(begin))] if self._probing else []
        try:
            await self._until_over(source, deadline)
            self._over.set()
            for task in (source, *side):
                task.cancel()
            await asyncio.gather(source, *side, return_exceptions=True)
            if self._running:
                left = min(self._plan.drain, deadline - time.perf_counter())
                await asyncio.wait(self._running, timeout=max(0.0, left))
            rest = list(self._running)
            for task in rest:
                task.cancel()
            _raise_bugs(await asyncio.gather(*rest, return_exceptions=True))
        finally:
            heart.cancel()
            self._client.close()

    # Sender

    async def send(
        self, record: Record, endpoint: str, body: dict[str, Any], cancel_at: int | None = None
    ) -> str:
        if self._over.is_set() or (self._budget is not None and self._started >= self._budget):
            self._over.set()
            raise LoadOver
        due = record.kind == "load" and record.intended < self._end
        self._started += record.kind == "load"
        self._due += due
        try:
            text = await self._through(record, endpoint, body, cancel_at, due)
        finally:
            self._due -= due
            if record.outcome == "pending":  # cancelled while it waited for room
                record.outcome = "unfinished"
            self._sink(record)
        if record.outcome == "error" and self._plan.closed:
            await self.sleep_until(time.perf_counter() + ERROR_PAUSE)
        return text

    async def sleep_until(self, when: float) -> None:
        if self._over.is_set():
            raise LoadOver
        delay = when - time.perf_counter()
        if delay > 0:
            try:
                async with asyncio.timeout(delay):
                    await self._over.wait()
            except TimeoutError:
                return
            raise LoadOver
        await asyncio.sleep(0)

    async def _through(
        self, record: Record, endpoint: str, body: dict[str, Any], cancel_at: int | None, due: bool
    ) -> str:
        """Send it once there is room, unless by then only what is due is still of interest."""
        if self._room is None:
            return await self._sent(record, endpoint, body, cancel_at)
        waiting = time.perf_counter()
        record.started = record.ended = waiting
        async with self._room:
            record.queued = time.perf_counter() - waiting
            if self._over.is_set() and not due:
                raise LoadOver
            return await self._sent(record, endpoint, body, cancel_at)

    async def _sent(self, record: Record, endpoint: str, body: dict[str, Any], cancel_at: int | None) -> str:
        self._in_flight += 1
        try:
            return await self._client.send(endpoint, body, record, cancel_at)
        finally:
            self._in_flight -= 1

    # Users and arrivals

    async def _closed(self, begin: float) -> None:
        plan = self._plan
        for number in range(self._process, plan.users or 0, plan.processes):
            at = begin + number / plan.spawn_rate
            await self.sleep_until(at)
            user = self._user(number)
            user.due(at)
            self._spawn(self._live(user))
        await self._over.wait()

    async def _live(self, user: User) -> None:
        """A user's life: one task after another."""
        self._users += 1
        try:
            await user.on_start()
            while True:
                since = time.perf_counter()
                await self._play(user)
                await user.pause(time.perf_counter() - since)
        finally:
            self._users -= 1
            await user.on_stop()

    async def _open(self, begin: float) -> None:
        mine = self._plan.arrivals()[self._process :: self._plan.processes]
        for number, (at, timed) in enumerate(mine):
            await self.sleep_until(begin + at)
            user = self._user(number)
            user.due(begin + at)
            if isinstance(user, SessionUser):
                user.timed = timed
            self._spawn(self._visit(user))

    async def _visit(self, user: User) -> None:
        self._users += 1
        try:
            await user.on_start()
            await self._play(user)
        finally:
            self._users -= 1
            await user.on_stop()

    async def _play(self, user: User) -> None:
        names, weights = tasks_of(type(user))
        (name,) = user.random.choices(names, weights)
        await getattr(user, name)()

    def _user(self, number: int) -> User:
        rng = random.Random(f"{self._plan.seed} {self._process} user {number}")
        (kind,) = rng.choices(self._classes, [each.weight for each in self._classes])
        user = kind(self, rng)
        if self._plan.scenario is not None:
            user.common = self._plan.workload.body
        return user

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or isinstance(task.exception(), LoadOver | None):
            self._running.discard(task)
        else:
            self._over.set()  # a mistake in a scenario: `run` raises it

    @property
    def _probing(self) -> bool:
        return self._plan.probe_rate > 0 and self._process == 0

    async def _probes(self, begin: float) -> None:
        """Tiny requests that have nothing to do with the load and show how it holds up others."""
        length = self._plan.length or 3600.0
        for at in OpenLoop(self._plan.probe_rate).times(length, self._plan.seed + 1):
            await self.sleep_until(begin + at)
            record = Record("probe", kind="probe", intended=begin + at)
            body = {"messages": [{"role": "user", "content": f"Hi {at:.3f}"}], "max_tokens": 1}
            self._spawn(self._probe(record, body))

    async def _probe(self, record: Record, body: dict[str, Any]) -> None:
        await self.send(record, "chat", body)

    # The end, and the heartbeat

    async def _until_over(self, source: asyncio.Task[None], deadline: float) -> None:
        """Until nothing more is to be sent."""
        over = asyncio.create_task(self._over.wait())
        left = self._end - time.perf_counter()
        timeout = None if left == float("inf") else max(0.0, left)
        await asyncio.wait({over, source}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        over.cancel()
        if source.done() and not self._over.is_set():
            source.result()
        # Conversations of several turns go on until the end, and the load until what was due has ended.
        while not self._over.is_set() and time.perf_counter() < deadline:
            idle = not self._running if source.done() else not self._due
            if idle and (source.done() or time.perf_counter() >= self._end):
                return
            await asyncio.sleep(_HEARTBEAT)

    async def _beat(self, on_tick: Callable[[Tick], bool]) -> None:
        beats = 0
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_HEARTBEAT)
            now = time.perf_counter()
            self._lag = max(self._lag, now - before - _HEARTBEAT)
            beats += 1
            if beats % 5 == 0:
                tick = Tick(now, self._in_flight, self._users, self._started, self._lag)
                self._lag = 0.0
                if on_tick(tick):
                    self._over.set()


def _raise_bugs(failures: list[Any]) -> None:
    """A mistake in a scenario ends the run; the end of the load does not."""
    for failure in failures:
        if isinstance(failure, Exception) and not isinstance(failure, LoadOver):
            raise failure
