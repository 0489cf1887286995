"""The live view of a run: a table that moves in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections import Counter
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from loadtest.observe import Observation
from loadtest.plan import Plan
from loadtest.record import Record
from loadtest.slo import Slo
from loadtest.stats import percentile
from loadtest.summary import arrivals_of_tokens

_RECENT = 10.0  # seconds that rates look back
_LINE_EVERY = 10.0  # seconds between lines where there is no terminal


class LiveView:
    """Fed with the observation as it grows; use it as a context."""

    def __init__(self, plan: Plan, slo: Slo | None, title: str, quiet: bool = False) -> None:
        self._plan = plan
        self._slo = slo
        self._title = title
        self._quiet = quiet
        self._console = Console(file=sys.stderr)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._shown_at = time.perf_counter()

    def __enter__(self) -> LiveView:
        if self._console.is_terminal and not self._quiet:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live.is_started:
            self._live.stop()

    def show(self, seen: Observation) -> None:
        """Draw what is known now, not too often."""
        now = time.perf_counter()
        if self._quiet or now - self._shown_at < (0.5 if self._live.is_started else _LINE_EVERY):
            return
        self._shown_at = now
        if self._live.is_started:
            self._live.update(self._picture(seen, now), refresh=True)
        else:
            self._console.print(self._line(seen, now), highlight=False, soft_wrap=True)

    def _picture(self, seen: Observation, now: float) -> Group:
        table = Table(expand=False, pad_edge=False)
        table.add_column("name")
        for head in ("# reqs", "# fails", "req/s", "TTFT p50", "p99", "TPOT p50", "p99", "E2E p50"):
            table.add_column(head, justify="right")
        groups: dict[str, list[Record]] = {}
        for record in seen.records:
            groups.setdefault(record.name, []).append(record)
        for name, records in sorted(groups.items()):
            table.add_row(name, *_cells(records, now))
        if len(groups) != 1:
            load = [record for record in seen.records if record.kind == "load"]
            table.add_row("Aggregated", *_cells(load, now), style="bold")
        errors = Counter(record.error for record in seen.records if record.outcome == "error")
        lines = [Text(f"{count} x {kind}", style="red") for kind, count in errors.most_common(3)]
        length = self._plan.length
        parts: list[Text | ProgressBar | Table] = [Text(self._line(seen, now), style="bold"), table, *lines]
        whole = self._plan.requests or len(self._plan.trace)
        if length or whole:
            share = (now - seen.begin) / length if length else seen.current()[2] / whole
            parts.insert(1, ProgressBar(total=1.0, completed=min(1.0, max(0.0, share)), width=60))
        return Group(*parts)

    def _line(self, seen: Observation, now: float) -> str:
        in_flight, users, _ = seen.current()
        recent = [r for r in seen.records if r.ended is not None and r.ended > now - _RECENT]
        times, amounts = arrivals_of_tokens(recent)
        span = min(_RECENT, max(now - seen.begin, 1e-9))
        pace = sum(amount for at, amount in zip(times, amounts, strict=True) if at > now - span) / span
        load = [record for record in seen.records if record.kind == "load"]
        failed = sum(record.outcome == "error" for record in load)
        line = (
            f"{self._title}  {max(0.0, now - seen.begin):.0f} s  {users} users, {in_flight} in flight, "
            f"{len(load)} done, {failed} failed, ~{pace:.0f} tok/s"
        )
        if self._slo is not None and load:
            good = sum(self._slo.good(record) for record in load)
            line += f", {good / len(load):.0%} within {self._slo}"
        return line


def _cells(records: list[Record], now: float) -> list[str]:
    ok = [record for record in records if record.ok]
    recent = [record for record in ok if record.ended is not None and record.ended > now - _RECENT]
    cells = [
        str(len(records)),
        str(sum(record.outcome == "error" for record in records)),
        f"{len(recent) / _RECENT:.2f}",
    ]
    for values, shares in (
        ([record.ttft for record in ok], (0.5, 0.99)),
        ([record.tpot for record in ok], (0.5, 0.99)),
        ([record.e2e for record in ok], (0.5,)),
    ):
        ordered = sorted(1e3 * value for value in values if value is not None)
        cells += [f"{percentile(ordered, share):.0f} ms" if ordered else "" for share in shares]
    return cells
