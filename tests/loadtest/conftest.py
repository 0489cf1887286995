"""A server with known timing, on the real clock and on a virtual one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.loadtest.stub import Stub
from tests.loadtest.virtual import Virtual


@pytest.fixture
def stub() -> Iterator[Callable[..., Stub]]:
    """Starts stubs."""
    started: list[Stub] = []

    def start(**settings: Any) -> Stub:
        started.append(Stub(**settings).start())
        return started[-1]

    yield start
    for each in started:
        each.stop()


@pytest.fixture
def virtual(monkeypatch: pytest.MonkeyPatch) -> Iterator[Virtual]:
    clock = Virtual(monkeypatch)
    yield clock
    clock.loop.close()
