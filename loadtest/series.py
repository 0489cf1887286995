"""A run over time, second by second, for charts and for locust's history file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from loadtest.generator import Tick
from loadtest.record import Record
from loadtest.scrape import Scrape
from loadtest.stats import percentile
from loadtest.summary import arrivals_of_tokens


def over_time(
    records: Sequence[Record],
    ticks: Sequence[Sequence[Tick]],
    scrapes: Sequence[Scrape],
    begin: float,
    end: float,
) -> list[dict[str, Any]]:
    """A row for every second (every so many, if there are over 600) of what was sent, came and failed."""
    load = [record for record in records if record.kind == "load"]
    step = max(1.0, math.ceil((end - begin) / 600))
    count = max(1, math.ceil((end - begin) / step))
    rows: list[dict[str, Any]] = [
        {"time": place * step, "tokens": 0.0, "started": 0, "ended": 0, "failed": 0, "_ttft": []}
        for place in range(count)
    ]

    def row(time: float) -> dict[str, Any]:
        return rows[min(max(int((time - begin) / step), 0), count - 1)]

    for time, amount in zip(*arrivals_of_tokens(load), strict=True):
        row(time)["tokens"] += amount / step
    for record in load:
        row(record.started)["started"] += 1
        if record.ended is not None:
            row(record.ended)["ended" if record.ok else "failed"] += 1
        if record.ttft is not None:
            row(record.intended)["_ttft"].append(1e3 * record.ttft)
    for each in rows:
        ordered = sorted(each.pop("_ttft"))
        each["ttft_p50"] = percentile(ordered, 0.5) if ordered else None
        each["ttft_max"] = ordered[-1] if ordered else None
        each |= {"in_flight": 0, "users": 0}
    for process in ticks:
        _levels(process, rows, row)
    _verify_lengths(scrapes, row)
    return rows


def _levels(process: Sequence[Tick], rows: list[dict[str, Any]], row: Any) -> None:
    """Add one process's last known levels to every row."""
    latest: dict[int, Tick] = {id(row(tick.time)): tick for tick in process}
    tick = None
    for each in rows:
        tick = latest.get(id(each), tick)
        if tick is not None:
            each["in_flight"] += tick.in_flight
            each["users"] += tick.users


def _verify_lengths(scrapes: Sequence[Scrape], row: Any) -> None:
    for earlier, later in itertools.pairwise(scrapes):
        grown = [
            later.values.get(name, 0.0) - earlier.values.get(name, 0.0)
            for name in ("verify_length_sum", "verify_length_count")
        ]
        if grown[1] > 0:
            row((earlier.time + later.time) / 2)["verify_length"] = grown[0] / grown[1]
