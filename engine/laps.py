"""How long the parts of a step took."""

from __future__ import annotations

import time
from typing import Protocol


class Laps(Protocol):
    """A watch for one step."""

    def lap(self) -> None:
        """A part has ended here; the first call begins the first part."""

    def seconds(self) -> list[float]:
        """Of each part, once the step is over."""


class HostLaps:
    """By the host's clock: right where the work is done when a call returns."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def lap(self) -> None:
        self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [after - before for before, after in zip(self._times, self._times[1:], strict=False)]
