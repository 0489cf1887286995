"""A process that makes load, and what it tells the process that watches."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from loadtest.generator import Generator, Tick
from loadtest.plan import Plan
from loadtest.record import Record


@dataclass(frozen=True, slots=True)
class Ready:
    """It has loaded everything and waits for the time to begin."""


@dataclass(slots=True)
class News:
    """What has happened since the last news."""

    tick: Tick
    records: list[Record] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Done:
    """It is over: the rest of the records, processor seconds spent, and what went wrong, if anything did."""

    records: list[Record]
    cpu_seconds: float
    failure: str | None = None


def work(plan: Plan, process: int, pipe: Connection[Any, Any]) -> None:
    """Be process number `process` of a plan; the watcher at the other end of `pipe` says when to begin."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the watcher decides what Ctrl+C means
    _raise_file_limit()
    with contextlib.suppress(BrokenPipeError, EOFError):  # the watcher is gone
        try:
            runner = asyncio.Runner(loop_factory=_loop_factory())
            with runner:
                runner.run(_work(plan, process, pipe))
        except Exception as error:
            pipe.send(Done([], 0.0, f"{type(error).__name__}: {error}"))


async def _work(plan: Plan, process: int, pipe: Connection[Any, Any]) -> None:
    records: list[Record] = []
    generator = Generator(plan, process, records.append)
    pipe.send(Ready())
    begin: float = await asyncio.to_thread(pipe.recv)
    spent = time.process_time()

    def on_tick(tick: Tick) -> bool:
        pipe.send(News(tick, list(records)))
        records.clear()
        return pipe.poll() and pipe.recv() is None

    await generator.run(begin, on_tick)
    pipe.send(Done(records, time.process_time() - spent))


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def _raise_file_limit() -> None:
    """Every request in flight is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
