"""`dspark loadtest compare`: two results side by side, with intervals."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.table import Table

from loadtest.curves import figure
from loadtest.report_text import number, wide_console
from loadtest.stats import Ratio, bootstrap_ratio, percentile, ratio_of_means

_OF_REQUESTS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "p50": lambda values: percentile(sorted(values), 0.5),
    "p95": lambda values: percentile(sorted(values), 0.95),
}
_OF_POINTS = ("throughput", "pace", "ttft_p50", "ttft_p95", "tpot_p50", "goodput")

#: what is compared, A, B, how B stands to A
Row = tuple[str, float, float, Ratio | None]


class NotComparable(ValueError):
    """The message says why."""


def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        rows = compare(load(args.a), load(args.b))
    except (OSError, NotComparable) as error:
        print(f"dspark loadtest compare: {error}", file=sys.stderr)
        return 2
    shown = Table("", "A", "B", "B / A", "95 % interval", "")
    for name, a, b, ratio in rows:
        interval = "-"
        if ratio is not None and ratio.low is not None and ratio.high is not None:
            interval = f"{ratio.low:.3f} to {ratio.high:.3f}"
        verdict = "" if ratio is None or not ratio.clear else ("more" if ratio.value > 1 else "less")
        value = "-" if ratio is None else f"{ratio.value:.3f}"
        shown.add_row(name, number(a, 2), number(b, 2), value, interval, verdict)
    for column in shown.columns[1:5]:
        column.justify = "right"
    console = wide_console()
    console.print(f"A: {args.a}\nB: {args.b}", highlight=False)
    console.print(shown)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dspark loadtest compare",
        description="Compare two runs (intervals over their requests), or two sweeps or configurations of "
        "sweeps load by load (intervals over their seeds).",
        allow_abbrev=False,
    )
    text = "the --json of a run, the sweep.json of a sweep, or sweep.json:CONFIG for one configuration of it"
    parser.add_argument("a", metavar="A", help=text)
    parser.add_argument("b", metavar="B", help="what to compare with A, of the same kind")
    return parser


def load(name: str) -> dict[str, Any]:
    """A result file, cut down to one configuration if one was named. Raises NotComparable or OSError."""
    path, config = Path(name), None
    if not path.exists() and ".json:" in name:
        front, _, config = name.partition(".json:")
        path = Path(front + ".json")
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        kind = result["kind"]
    except (ValueError, KeyError, TypeError):
        raise NotComparable(f"{path} is no result of a load test") from None
    if config is None:
        return result
    if kind != "sweep" or config not in result["points"]:
        known = ", ".join(result.get("points", {})) or "none"
        raise NotComparable(f"{path} holds no configuration {config!r}, but {known}")
    return result | {"points": {"": result["points"][config]}}


def compare(a: dict[str, Any], b: dict[str, Any]) -> list[Row]:
    """Rows of figures that both have. Raises NotComparable."""
    if a["kind"] != b["kind"]:
        raise NotComparable(f"a {a['kind']} and a {b['kind']} have nothing to compare")
    rows = _runs(a, b) if a["kind"] == "run" else _sweeps(a, b)
    if not rows:
        raise NotComparable("the two have no figure in common")
    return rows


def _runs(a: dict[str, Any], b: dict[str, Any]) -> list[Row]:
    parts = [each["throughput"]["output_tokens_per_second_parts"] for each in (a, b)]
    rows: list[Row] = [("output tokens/s", fmean(parts[0]), fmean(parts[1]), ratio_of_means(*parts))]
    for metric in ("ttft", "tpot", "e2e"):
        samples = [_column(each, metric) for each in (a, b)]
        if not all(samples):
            continue
        for name, statistic in _OF_REQUESTS.items():
            ratio = bootstrap_ratio(samples[0], samples[1], statistic)
            values = [1e3 * statistic(sample) for sample in samples]
            rows.append((f"{metric.upper()} {name}, ms", values[0], values[1], ratio))
    if a.get("slo") and b.get("slo") and a["slo"]["limits"] == b["slo"]["limits"]:
        good = [[1.0] * each["slo"]["good"] for each in (a, b)]
        for sample, each in zip(good, (a, b), strict=True):
            sample += [0.0] * (each["slo"]["attempted"] - each["slo"]["good"])
        if all(good):
            ratio = bootstrap_ratio(good[0], good[1], fmean)
            rows.append((f"within {a['slo']['limits']}", fmean(good[0]), fmean(good[1]), ratio))
    return rows


def _column(result: dict[str, Any], metric: str) -> list[float]:
    """A figure of each measured, completed request."""
    columns = result["records"]["columns"]
    rows = (dict(zip(columns, row, strict=True)) for row in result["records"]["rows"])
    return [
        row[metric]
        for row in rows
        if row["measured"] and row["kind"] == "load" and row["outcome"] == "ok" and row[metric] is not None
    ]


def _sweeps(a: dict[str, Any], b: dict[str, Any]) -> list[Row]:
    if a["unit"] != b["unit"]:
        raise NotComparable(f"loads of {a['unit']} and of {b['unit']} are not the same")
    names = [name for name in _OF_POINTS if name != "goodput" or a["slo"] == b["slo"]]
    rows: list[Row] = []
    for config in (name for name in a["points"] if name in b["points"]):
        loads = a["points"][config].keys() & b["points"][config].keys()
        for load_name in sorted(loads, key=float):
            for name in names:
                samples = [_seeds(each["points"][config][load_name], name) for each in (a, b)]
                if all(samples):
                    label = " ".join(part for part in (config, load_name, a["unit"], name) if part)
                    rows.append((label, fmean(samples[0]), fmean(samples[1]), ratio_of_means(*samples)))
    return rows


def _seeds(runs: Sequence[dict[str, Any]], name: str) -> list[float]:
    return [value for value in (figure(run, name) for run in runs) if value is not None]
