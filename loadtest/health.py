"""Whether the client kept up: a slow client looks like a slow server, so a run must say which it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadtest.generator import Tick
from loadtest.record import Record
from loadtest.stats import percentile
from loadtest.summary import SHARES, Window

#: seconds of lateness, at the 99th percentile, over which a run is degraded
LAG_LIMIT = 0.1
#: share of a core over which a load process has nothing left
CPU_LIMIT = 0.8
#: share of the offered rate that must really have been sent
RATE_LIMIT = 0.98


def client_health(
    records: Sequence[Record],
    ticks: Sequence[Sequence[Tick]],
    cpu_seconds: Sequence[float],
    wall_seconds: float,
    window: Window,
    open_loop: bool,
) -> dict[str, Any]:
    """Lags in milliseconds, the client's own cost, and in `degraded` what was wrong, if anything was."""
    due = [record for record in records if window.holds(record.intended)]
    sent = [record for record in records if window.holds(record.started)]
    lag = _spread([record.lag for record in due])
    queue = _spread([record.queued for record in due])
    loop = _spread([tick.lag for process in ticks for tick in process if window.holds(tick.time)])
    cpu = [spent / max(wall_seconds, 1e-9) for spent in cpu_seconds]
    out: dict[str, Any] = {
        "send_lag_ms": lag,
        "queue_ms": queue,
        "loop_lag_ms": loop,
        "cpu_share": cpu,
        "processes": len(cpu_seconds),
    }
    reasons = []
    if lag and lag["p99"] > 1e3 * LAG_LIMIT:
        reasons.append(f"requests were sent {lag['p99']:.0f} ms late (p99)")
    if loop and loop["p99"] > 1e3 * LAG_LIMIT:
        reasons.append(f"replies may have been read {loop['p99']:.0f} ms late (p99)")
    if queue and queue["p99"] > 1e3 * LAG_LIMIT:
        reasons.append(f"requests waited {queue['p99']:.0f} ms for --max-in-flight (p99)")
    if cpu and max(cpu) > CPU_LIMIT:
        reasons.append(f"a load process took {max(cpu):.0%} of a core: give it more --processes")
    if open_loop and window.seconds > 0:
        out["offered_per_second"] = len(due) / window.seconds
        out["achieved_per_second"] = len(sent) / window.seconds
        # One request more or less at the edges of the window proves nothing.
        if len(sent) + 2 < RATE_LIMIT * len(due):
            reasons.append(f"only {len(sent)} of {len(due)} requests were sent in time")
    return out | {"degraded": reasons}


def _spread(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    ordered = sorted(1e3 * value for value in seconds)
    return {name: percentile(ordered, share) for name, share in SHARES.items()} | {"max": ordered[-1]}
