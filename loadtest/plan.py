"""A run, completely described; processes get it whole and each takes its share."""

from __future__ import annotations

from dataclasses import dataclass

from loadtest.arrivals import OpenLoop, Timed
from loadtest.client import Target
from loadtest.workload import Workload


@dataclass(frozen=True, slots=True)
class Plan:
    """Closed loop with `users`, or open loop with `open_loop` or `trace`; `workload` or a `scenario` file.

    It runs for `run_time` seconds or until `requests` have been sent (of an open loop: so many arrivals, each
    a conversation of one or more turns). Measured is what was due in that time,
    after `warmup` and before the last `cooldown` seconds. A timed run keeps its load up until what was due in
    it has ended, so that the last requests are not flattered; then what is under way may end. All of that
    takes at most `drain` seconds more.
    """

    target: Target
    workload: Workload
    scenario: str | None = None
    users: int | None = None
    spawn_rate: float = float("inf")
    open_loop: OpenLoop | None = None
    trace: tuple[Timed, ...] = ()
    run_time: float | None = None
    requests: int | None = None
    warmup: float = 0.0
    cooldown: float = 0.0
    drain: float = 60.0
    max_in_flight: int | None = None
    probe_rate: float = 0.0
    seed: int = 0
    processes: int = 1

    @property
    def length(self) -> float | None:
        """Seconds for which requests are sent; None: until all are."""
        if self.run_time is not None:
            return self.run_time
        if self.open_loop is not None and self.requests is not None:
            return 2 * self.requests / (self.open_loop.rate + (self.open_loop.rate_to or self.open_loop.rate))
        return None

    @property
    def closed(self) -> bool:
        return self.users is not None

    def arrivals(self) -> list[tuple[float, Timed | None]]:
        """When an open loop sends, in seconds from the beginning, and from the end on as long as it must."""
        length = self.length
        if self.trace:
            timed = [(one.at, one) for one in self.trace if length is None or one.at <= length]
            return list(timed[: self.requests])
        assert self.open_loop is not None
        assert length is not None
        times = self.open_loop.times(length, self.seed)
        if self.requests is None:
            further = OpenLoop(self.open_loop.end, None, self.open_loop.burstiness)
            times += [length + time for time in further.times(self.drain, self.seed + 1)]
        return [(time, None) for time in times[: self.requests]]

    def share(self, amount: int | None, process: int) -> int | None:
        """Of so many things, those of one process."""
        if amount is None:
            return None
        return amount // self.processes + (process < amount % self.processes)
