"""What else the machine did while something was measured on it."""

from __future__ import annotations

import os
import time


class OtherLoad:
    """Processors that were busy with other programs since this was made; 0 where Linux does not tell.

    Only processors that this process may use count. What the host of a virtual machine took from it
    counts as well. Ticks are 10 ms: spans below half a second say little.
    """

    def __init__(self) -> None:
        self.processors = len(_own_processors())
        self._begun = _clocks()

    def share(self) -> float:
        """Of all processors, between 0 and 1."""
        wall, busy, own = (now - then for now, then in zip(_clocks(), self._begun, strict=True))
        return min(1.0, max(0.0, busy - own) / max(wall, 1e-6) / self.processors)


def _clocks() -> tuple[float, float, float]:
    """Seconds: of the clock, of all processors' work, of this process's work."""
    return time.perf_counter(), _busy(), time.process_time()


def _own_processors() -> set[int]:
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # not on Linux
        return set(range(os.cpu_count() or 1))


def _busy() -> float:
    """Seconds that own processors have worked for anybody; as much as this process's own if unknown."""
    names = {f"cpu{number}" for number in _own_processors()}
    ticks = 0
    try:
        with open("/proc/stat", encoding="ascii") as file:
            for line in file:
                name, *counts = line.split()
                if name in names:  # user, nice, system, idle, iowait, irq, softirq, steal
                    user, nice, system, _, _, irq, softirq, steal = map(int, counts[:8])
                    ticks += user + nice + system + irq + softirq + steal
        return ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError):
        return time.process_time()
