"""Users with weighted tasks, in the manner of a locustfile.

    from loadtest import User, between, task

    class Reader(User):
        wait_time = between(1, 3)

        @task(3)
        async def ask(self):
            answer = await self.chat("What is a prefix cache?", max_tokens=80)
            further = [*answer.messages, {"role": "user", "content": "Shorter, please."}]
            await self.chat(further, max_tokens=30)

        @task
        async def code(self):
            await self.complete("def fibonacci(n):", max_tokens=60, temperature=0.8)

In a closed loop each user does one task after another, with its wait time in between. In an open loop
every arrival is a fresh user who does one task.
"""

from __future__ import annotations

import importlib.util
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol, TypeVar

from loadtest.record import Record

Task = TypeVar("Task", bound=Callable[..., Awaitable[None]])
#: seconds until the next task, by the user and how long the last task took
WaitTime = Callable[[Any, float], float]
Messages = list[dict[str, Any]]


def task(weight: Any = 1) -> Any:
    """Mark a method as a task: `@task`, or `@task(3)` to have it three times as often."""

    def mark(method: Task) -> Task:
        method.task_weight = weight  # type: ignore[attr-defined]
        return method

    if callable(weight):
        method, weight = weight, 1
        return mark(method)
    return mark


def between(least: float, most: float) -> WaitTime:
    """Wait for some seconds between two bounds."""
    return lambda user, took: user.random.uniform(least, most)


def constant(seconds: float) -> WaitTime:
    """Wait always as long."""
    return lambda user, took: seconds


def constant_pacing(seconds: float) -> WaitTime:
    """Begin a task every so many seconds, as far as tasks do not take longer."""
    return lambda user, took: max(0.0, seconds - took)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer: its text, the conversation with it, and what was recorded."""

    text: str
    messages: Messages
    record: Record


class LoadOver(Exception):
    """The run sends nothing any more; users let this pass."""


class Sender(Protocol):
    """What the load generator gives its users."""

    async def send(
        self,
        record: Record,
        endpoint: str,
        body: dict[str, Any],
        cancel_at: int | None,
    ) -> str:
        """Send one request and record it; returns the text that came. Raises LoadOver at the end."""

    async def sleep_until(self, when: float) -> None:
        """Wait for a time of the clock. Raises LoadOver if the run ends before it."""


class User:
    """Subclass it and mark methods with `@task`."""

    #: share of this class among all users of the file
    weight: float = 1
    wait_time: ClassVar[WaitTime] = constant(0.0)
    #: fields of every request, from the command line, unless a task gives them
    common: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, sender: Sender, rng: random.Random) -> None:
        self.random = rng
        self._sender = sender
        self._due: float | None = None

    async def on_start(self) -> None:
        """Called once, before the first task."""

    async def on_stop(self) -> None:
        """Called once, after the last task."""

    async def chat(
        self,
        messages: str | Messages,
        *,
        name: str | None = None,
        cancel_after: int | None = None,
        **body: Any,
    ) -> Reply:
        """Ask for a chat answer; `body` are further fields of the request.

        `name` groups requests in the report; `cancel_after`: hang up after so many tokens.
        """
        turns: Messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        body = {**self.common, **body}
        record = self._record(name or "chat", body)
        text = await self._sender.send(record, "chat", {"messages": turns} | body, cancel_after)
        return Reply(text, [*turns, {"role": "assistant", "content": text}], record)

    async def complete(
        self,
        prompt: str | list[int],
        *,
        name: str | None = None,
        cancel_after: int | None = None,
        **body: Any,
    ) -> Reply:
        """Ask for the continuation of a text or of token ids."""
        body = {**self.common, **body}
        record = self._record(name or "completion", body)
        text = await self._sender.send(record, "completions", {"prompt": prompt} | body, cancel_after)
        return Reply(text, [], record)

    async def pause(self, took: float = 0.0) -> None:
        """Think for the wait time; the latency of the next request begins when that is over."""
        when = time.perf_counter() + self.wait_time(took)
        await self._sender.sleep_until(when)
        self.due(when)

    def due(self, when: float) -> None:
        """The next request should be sent at that time of the clock: its latency begins there."""
        self._due = when

    def _record(self, name: str, body: dict[str, Any]) -> Record:
        intended, self._due = self._due, None
        wanted = body.get("max_completion_tokens", body.get("max_tokens")) if body.get("ignore_eos") else None
        if intended is None:
            intended = time.perf_counter()
        return Record(name, intended=intended, wanted_tokens=wanted)


def tasks_of(user: type[User]) -> tuple[list[str], list[float]]:
    """Names and weights of a class's tasks. Raises ValueError if it has none or hides a method of User."""
    found = [
        (name, float(getattr(user, name).task_weight))
        for name in dir(user)
        if hasattr(getattr(user, name), "task_weight")
    ]
    hidden = [name for name, _ in found if hasattr(User, name)]
    if hidden:
        raise ValueError(f"{user.__name__}: a task must not be called {hidden[0]}, which is a method of User")
    if not found or not any(weight > 0 for _, weight in found):
        raise ValueError(f"{user.__name__} has no method marked with @task")
    return [name for name, _ in found], [weight for _, weight in found]


def load_scenario(path: Path) -> list[type[User]]:
    """The user classes that a file defines. Raises ValueError if it cannot be loaded or has none."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    users = [
        value
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, User) and value.__module__ == module.__name__
    ]
    users = [user for user in users if user.weight > 0]
    if not users:
        raise ValueError(f"{path} defines no subclass of loadtest.User")
    for user in users:
        tasks_of(user)
    return users
