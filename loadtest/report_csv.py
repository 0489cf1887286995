"""The files that locust writes: statistics, history, failures, exceptions. What reads its, reads ours."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from loadtest.observe import Observation
from loadtest.record import Record
from loadtest.stats import percentile
from loadtest.summary import Window

_SHARES = (0.5, 0.66, 0.75, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999, 0.9999, 1.0)
_PERCENTILES = [f"{round(100 * share, 2):g}%" for share in _SHARES]
_STATS = [
    "Type", "Name", "Request Count", "Failure Count", "Median Response Time", "Average Response Time",
    "Min Response Time", "Max Response Time", "Average Content Size", "Requests/s", "Failures/s",
    *_PERCENTILES,
]  # fmt: skip
_HISTORY = [
    "Timestamp", "User Count", "Type", "Name", "Requests/s", "Failures/s", *_PERCENTILES,
    "Total Request Count", "Total Failure Count", "Total Median Response Time",
    "Total Average Response Time", "Total Min Response Time", "Total Max Response Time",
    "Total Average Content Size",
]  # fmt: skip
_RECENT = 10.0  # seconds that a line of the history looks back


def write_csv(prefix: str, observation: Observation, window: Window) -> list[Path]:
    """PREFIX_stats.csv and the others. Content size is in tokens; response times in milliseconds.

    Statistics are of the measured window, the history of the whole run.
    """
    load = [record for record in observation.records if record.kind == "load"]
    due = [record for record in load if window.holds(record.intended)]
    failed = [record for record in due if record.outcome in ("error", "unfinished")]
    kinds = Counter((record.name, record.error or record.outcome) for record in failed)
    tables: dict[str, tuple[list[str], Iterable[Sequence[object]]]] = {
        "stats": (_STATS, _stats(due, window.seconds)),
        "stats_history": (_HISTORY, _history(load, observation)),
        "failures": (
            ["Method", "Name", "Error", "Occurrences"],
            [["POST", name, error, count] for (name, error), count in kinds.items()],
        ),
        "exceptions": (["Count", "Message", "Traceback", "Nodes"], []),
    }
    paths = []
    for name, (head, rows) in tables.items():
        path = Path(f"{prefix}_{name}.csv")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(head)
            writer.writerows(rows)
        paths.append(path)
    return paths


def _stats(due: Sequence[Record], seconds: float) -> Iterable[list[object]]:
    for name in sorted({record.name for record in due}):
        yield _line("POST", name, [record for record in due if record.name == name], seconds)
    yield _line("", "Aggregated", due, seconds)


def _line(kind: str, name: str, records: Sequence[Record], seconds: float) -> list[object]:
    failures = _failures(records)
    rates = [count / seconds if seconds else 0.0 for count in (len(records), failures)]
    times = _times(records)
    return [kind, name, len(records), failures, *_totals(records, times), *rates, *_percentiles(times)]


def _history(load: Sequence[Record], seen: Observation) -> Iterable[list[object]]:
    """A line for every second in which the run went on."""
    ended = [record for record in load if record.ended is not None]
    users: dict[int, list[int]] = {}
    for process in seen.ticks:
        for second, tick in {int(tick.time - seen.begin): tick for tick in process}.items():
            users.setdefault(second, []).append(tick.users)
    for second in range(int(seen.end - seen.begin) + 1):
        now = seen.begin + second + 1
        so_far = [record for record in ended if record.ended is not None and record.ended < now]
        recent = [record for record in so_far if record.ended is not None and record.ended >= now - _RECENT]
        span = min(_RECENT, second + 1)
        yield [
            int(seen.wall_begin) + second,
            sum(users.get(second, [])),
            "",
            "Aggregated",
            len(recent) / span,
            _failures(recent) / span,
            *_percentiles(_times(recent)),
            len(so_far),
            _failures(so_far),
            *_totals(so_far, _times(so_far)),
        ]


def _failures(records: Sequence[Record]) -> int:
    return sum(record.outcome in ("error", "unfinished") for record in records)


def _times(records: Sequence[Record]) -> list[float]:
    return sorted(1e3 * record.e2e for record in records if record.ok and record.e2e is not None)


def _totals(records: Sequence[Record], times: Sequence[float]) -> list[object]:
    """Median, mean, least, most, and content."""
    if not times:
        return [0, 0, 0, 0, 0]
    size = sum(record.tokens for record in records if record.ok) / len(times)
    return [percentile(times, 0.5), sum(times) / len(times), times[0], times[-1], size]


def _percentiles(times: Sequence[float]) -> list[object]:
    return [round(percentile(times, share), 3) if times else "N/A" for share in _SHARES]
