"""What a sweep shows: curves, the knee and the gains, in the terminal and as a page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from loadtest.charts import Axis, Line, chart
from loadtest.curves import Rung, gains, knee
from loadtest.page import charts, page, section, table
from loadtest.report_text import number, with_margin


@dataclass(frozen=True, slots=True)
class Sweep:
    """Rungs by configuration, the baseline first; `first` is the result of one run, for what they share."""

    rungs: Mapping[str, Sequence[Rung]]
    unit: str
    slo: str | None
    attainment: float
    first: Mapping[str, Any]

    @property
    def baseline(self) -> str:
        return next(iter(self.rungs))


Rows = tuple[list[str], list[list[str]]]


def points_table(swept: Sweep) -> Rows:
    """A row a rung."""
    head = [
        "configuration", swept.unit, "tok/s", "tok/s/user", "TTFT p50", "p95", "TPOT p50", "p95", "good",
        "good/s", "verify length", "accepted", "failed", "",
    ]  # fmt: skip
    rows = []
    for name, rungs in swept.rungs.items():
        for each in rungs:
            notes = ["degraded"] * each.degraded + ["saturated"] * each.saturated
            notes += ["token counts differ"] * (not each.agree)
            rows.append(
                [
                    name,
                    f"{each.load:g}",
                    _estimate(each, "throughput"),
                    _estimate(each, "pace"),
                    *(number(each.mean(key), 0) for key in ("ttft_p50", "ttft_p95")),
                    *(number(each.mean(key)) for key in ("tpot_p50", "tpot_p95")),
                    _percent(each.mean("attainment")),
                    number(each.mean("goodput"), 2),
                    number(each.mean("verify_length"), 2),
                    _percent(each.mean("acceptance")),
                    str(each.failed),
                    ", ".join(notes),
                ]
            )
    return head, rows


def knee_table(swept: Sweep) -> Rows | None:
    """How much load each configuration carries; None without an objective."""
    if swept.slo is None:
        return None
    rows = []
    for name, rungs in swept.rungs.items():
        found = knee(rungs, swept.attainment)
        if found is None:
            rows.append([name, "-", "-", "nothing was measured"])
            continue
        rows.append(
            [
                name,
                "none" if found.passing is None else f"{found.passing:g}",
                "none" if found.failing is None else f"{found.failing:g}",
                "yes" if found.monotone else "no: the knee lies in the noise between them",
            ]
        )
    return ["configuration", f"largest passing ({swept.unit})", "smallest failing", "monotone"], rows


def gains_tables(swept: Sweep) -> tuple[Rows, Rows] | None:
    """More throughput at the same pace, a faster pace at the same throughput; None with one configuration."""
    others = [name for name in swept.rungs if name != swept.baseline]
    if not others:
        return None
    base = swept.rungs[swept.baseline]
    found = {name: gains(base, swept.rungs[name]) for name in others}
    here = gains(base, base)
    more: list[list[str]] = []
    faster: list[list[str]] = []
    for place, at in enumerate(here):
        of = f"{swept.baseline} at {at.load:g} {swept.unit}"
        own = [found[name][place] for name in others]
        own_pace, own_throughput = number(at.pace), number(at.throughput)
        changes = [_change(gain.more_throughput) for gain in own]
        more.append([f"{own_pace} tok/s/user ({of})", own_throughput, *changes])
        changes = [_change(gain.faster) for gain in own]
        faster.append([f"{own_throughput} tok/s ({of})", own_pace, *changes])
    return (
        (["at a pace of", f"{swept.baseline}: tokens/s", *others], more),
        (["at a throughput of", f"{swept.baseline}: tokens/s/user", *others], faster),
    )


def print_sweep(swept: Sweep, console: Console) -> None:
    """All tables."""
    _print("Points", points_table(swept), console)
    knees = knee_table(swept)
    if knees is not None:
        _print(f"How much load keeps {swept.slo} for {swept.attainment:.0%}", knees, console)
    both = gains_tables(swept)
    if both is not None:
        _print("More throughput at the same pace per user", both[0], console)
        _print("Faster per user at the same throughput", both[1], console)


def sweep_page(swept: Sweep) -> str:
    """The HTML report."""
    target = swept.first["target"]
    load = swept.first["load"]
    shared = {name: value for name, value in load.items() if name not in ("users", "rate", "seed")}
    subtitle = f"{target['model']}, {swept.first['time']}; " + ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in shared.items()
    )
    alarms = []
    for name, rungs in swept.rungs.items():
        loads = ", ".join(f"{each.load:g}" for each in rungs if each.degraded)
        if loads:
            alarms.append(f"{name} at {loads} {swept.unit}: degraded, the client was too slow")
    knees, both = knee_table(swept), gains_tables(swept)
    sections = [section("Curves", charts(*_figures(swept)))]
    if knees is not None:
        sections.append(section(f"How much load keeps {swept.slo} for {swept.attainment:.0%}", table(*knees)))
    if both is not None:
        note = (
            '<p class="sub">Between rungs the curves are taken as straight. A dash: the configuration was '
            "not measured there, because it is faster, or slower, at every load of the ladder.</p>"
        )
        sections.append(section("At the same pace per user, how much more throughput", table(*both[0]), note))
        sections.append(section("At the same throughput, how much faster per user", table(*both[1])))
    sections.append(
        section(
            "Points",
            table(*points_table(swept)),
            '<p class="sub">Latencies in milliseconds; ± is a 95 % interval over seeds; of a '
            "single run, over ten parts of it.</p>",
        )
    )
    return page("Load sweep: " + ", ".join(swept.rungs), subtitle, alarms, sections)


def _figures(swept: Sweep) -> list[str]:
    load = Axis(swept.unit, log=True)

    def lines(key: str) -> list[Line]:
        return [
            _line(name, colour, rungs, lambda each: each.load, key)
            for colour, (name, rungs) in enumerate(swept.rungs.items())
        ]

    figures = []
    if swept.slo is not None:
        goal = [(f"{swept.attainment:.0%}", swept.attainment)]
        share = Axis("share of attempted requests", end=1.0, percent=True)
        figures.append(chart(f"SLA curve: {swept.slo}", load, share, lines("attainment"), goal))
        figures.append(chart("Goodput", load, Axis("good requests/s"), lines("goodput")))
    curves = [
        _line(name, colour, rungs, lambda each: each.mean("pace"), "throughput")
        for colour, (name, rungs) in enumerate(swept.rungs.items())
    ]
    figures.append(
        chart(
            "Throughput against pace per user",
            Axis("tokens/s/user (1 / mean TPOT)"),
            Axis("tokens/s"),
            curves,
        )
    )
    words = (word.partition(":") for word in (swept.slo or "").split())
    limits = {name: float(limit) for name, _, limit in words}
    for key, label in (("ttft", "TTFT"), ("tpot", "TPOT")):
        limit = [(f"{limits[key]:g} ms", limits[key])] if key in limits else []
        for share_name in ("p50", "p95"):
            figures.append(
                chart(f"{label}, {share_name}", load, Axis("ms"), lines(f"{key}_{share_name}"), limit)
            )
    figures.append(chart("Throughput against load", load, Axis("tokens/s"), lines("throughput")))
    figures.append(chart("Verify length", load, Axis("drafts a sequence and step"), lines("verify_length")))
    figures.append(
        chart("Accepted of verified drafts", load, Axis("share", end=1.0, percent=True), lines("acceptance"))
    )
    return figures


def _line(
    name: str, colour: int, rungs: Sequence[Rung], across: Callable[[Rung], float | None], key: str
) -> Line:
    points, errors, notes = [], [], []
    for each in rungs:
        place, figure = across(each), each.figures.get(key)
        if place is not None and figure is not None:
            points.append((place, figure.mean))
            margin = figure.margin
            errors.append(None if margin is None else (max(0.0, figure.mean - margin), figure.mean + margin))
            notes.append(f"(load {each.load:g})")
    return Line(name, points, errors, notes, colour=colour)


def _print(title: str, rows: Rows, console: Console) -> None:
    shown = Table(title=title, title_justify="left")
    for place, head in enumerate(rows[0]):
        shown.add_column(head, justify="left" if place == 0 else "right", overflow="fold")
    for row in rows[1]:
        shown.add_row(*row)
    console.print(shown)


def _estimate(each: Rung, key: str) -> str:
    figure = each.figures.get(key)
    return "-" if figure is None else with_margin(figure.mean, figure.margin)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _change(ratio: float | None) -> str:
    return "-" if ratio is None else f"{100 * (ratio - 1):+.0f} %"
