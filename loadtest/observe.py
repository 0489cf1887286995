"""Runs a plan in processes of its own and gathers what they tell."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from loadtest.generator import Tick
from loadtest.plan import Plan
from loadtest.record import Record
from loadtest.worker import Done, News, Ready, work

_LEAD = 0.2  # seconds between "begin at" and the beginning, so that every process hears of it in time


class LoadFailed(RuntimeError):
    """A process that made load could not go on; the message is for the user."""


@dataclass(slots=True)
class Observation:
    """Everything seen of a run; `ticks[p]` are those of process p. Times of the monotonic clock."""

    begin: float
    wall_begin: float
    records: list[Record] = field(default_factory=list)
    ticks: list[list[Tick]] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    end: float = 0.0
    #: why it ended before its time: "interrupted" or what the watcher said
    cut_short: str | None = None

    def current(self) -> tuple[int, int, int]:
        """(requests in flight, users, requests started) by the last tick of each process"""
        last = [ticks[-1] for ticks in self.ticks if ticks]
        return (
            sum(tick.in_flight for tick in last),
            sum(tick.users for tick in last),
            sum(tick.started for tick in last),
        )


#: sees the run as it goes, several times a second; a text ends it early and says why
Watcher = Callable[[Observation], str | None]


def observe(plan: Plan, watcher: Watcher) -> Observation:
    """Run `plan`. Ctrl+C ends it early and keeps what was seen; a second one raises. Raises LoadFailed."""
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection[Any, Any]] = []
    processes = []
    try:
        for number in range(plan.processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=work, args=(plan, number, theirs), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for pipe in pipes:
            _expect_ready(pipe)
        begin = time.perf_counter() + _LEAD
        seen = Observation(begin, time.time() + _LEAD, ticks=[[] for _ in pipes])
        for pipe in pipes:
            pipe.send(begin)
        _gather(seen, pipes, watcher)
        return seen
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _expect_ready(pipe: Connection[Any, Any]) -> None:
    try:
        message = pipe.recv()
    except EOFError:
        raise LoadFailed("a load process died at its start") from None
    if not isinstance(message, Ready):
        raise LoadFailed(message.failure)


def _gather(seen: Observation, pipes: list[Connection[Any, Any]], watcher: Watcher) -> None:
    """Until every process is done."""
    going = {pipe: number for number, pipe in enumerate(pipes)}
    while going:
        try:
            for ready in wait(list(going), timeout=0.25):
                assert isinstance(ready, Connection)
                if _take(seen, going[ready], ready):
                    del going[ready]
            if seen.cut_short is None:
                seen.cut_short = watcher(seen)
                if seen.cut_short is not None:
                    _stop(going)
        except KeyboardInterrupt:
            if seen.cut_short is not None:
                raise
            seen.cut_short = "interrupted"
            _stop(going)
    seen.end = time.perf_counter()


def _take(seen: Observation, number: int, pipe: Connection[Any, Any]) -> bool:
    """One message; true if it was the last of its process."""
    try:
        message = pipe.recv()
    except EOFError:
        raise LoadFailed("a load process died") from None
    seen.records += message.records
    if isinstance(message, News):
        seen.ticks[number].append(message.tick)
        return False
    assert isinstance(message, Done)
    if message.failure is not None:
        raise LoadFailed(message.failure)
    seen.cpu_seconds.append(message.cpu_seconds)
    return True


def _stop(going: dict[Connection[Any, Any], int]) -> None:
    for pipe in going:
        with contextlib.suppress(BrokenPipeError):  # it has just ended by itself
            pipe.send(None)
