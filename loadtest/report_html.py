"""The HTML report of one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loadtest.charts import Axis, Line, chart
from loadtest.page import charts, page, section, table, tiles
from loadtest.report_text import PERCENTILES, facts, latency_rows, number


def run_page(result: dict[str, Any]) -> str:
    """The document."""
    target, window = result["target"], result["window"]
    subtitle = (
        f"{target['model']} at {target['url']}, {result['time']}; {window['seconds']:.1f} s measured of "
        f"{window['run_seconds']:.1f} s"
    )
    alarms = [f"Degraded, the client was too slow: {reason}" for reason in result["health"]["degraded"]]
    if result["cut_short"]:
        alarms.append(f"Cut short: {result['cut_short']}")
    sections = [
        tiles(_tiles(result)),
        section(
            "Latency in milliseconds",
            table(["", "mean", *PERCENTILES, "max"], latency_rows(result["latency_ms"])),
            '<p class="sub">A star marks percentiles that so few requests cannot support with 95 % '
            "confidence. Latencies begin when a request should have been sent.</p>",
        ),
        section("Over time", charts(*_over_time(result))),
        section("Distributions", charts(*_distributions(result))),
        section("Figures", table([], facts(result), "facts")),
    ]
    if "by_name" in result:
        sections.append(section("By name", _by_name(result["by_name"])))
    if result["errors"]:
        rows = [[kind, str(count)] for kind, count in result["errors"].items()]
        sections.append(section("Errors", table(["kind", "count"], rows)))
    sections.append(section("Client", table([], _client(result["health"]), "facts")))
    sections.append(section("Load", table([], _flat(result["load"]), "facts")))
    engine = (target["server"] or {}).get("engine")
    if engine:
        sections.append(section("Server", table([], _flat(engine), "facts")))
    return page(f"Load test: {result['label']}", subtitle, alarms, sections)


def _tiles(result: dict[str, Any]) -> list[tuple[str, str]]:
    through, latencies = result["throughput"], result["latency_ms"]
    pairs = [
        ("output tokens/s", number(through["output_tokens_per_second"])),
        ("tokens/s/user", number(through["tokens_per_second_per_user"])),
        ("requests/s", number(through["requests_per_second"], 2)),
    ]
    for key, label in (("ttft", "TTFT p50"), ("tpot", "TPOT p50")):
        if latencies[key]:
            pairs.append((label, f"{number(latencies[key]['p50'])} ms"))
    if result.get("slo") and result["slo"]["attainment"] is not None:
        pairs.append((f"within {result['slo']['limits']}", f"{result['slo']['attainment']:.1%}"))
    failed = result["requests"]["error"] + result["requests"]["unfinished"]
    pairs.append(("failed of attempted", f"{failed} of {result['requests']['attempted']}"))
    return pairs


def _over_time(result: dict[str, Any]) -> list[str]:
    rows, seconds = result["series"], Axis("seconds")

    def line(name: str, key: str, **options: Any) -> Line:
        points = [(row["time"], row[key]) for row in rows if row.get(key) is not None]
        return Line(name, points, dots=len(points) < 40, **options)

    figures = [
        chart("Output tokens a second", seconds, Axis("tokens/s"), [line("tokens/s", "tokens")]),
        chart(
            "Users and requests in flight",
            seconds,
            Axis("count"),
            [line("in flight", "in_flight"), line("users", "users", dashed=True, colour=1)],
        ),
        chart(
            "TTFT of the requests of each second",
            seconds,
            Axis("ms"),
            [line("median", "ttft_p50"), line("largest", "ttft_max", dashed=True, colour=1)],
        ),
    ]
    if any("verify_length" in row for row in rows):
        figures.append(
            chart(
                "Verify length",
                seconds,
                Axis("drafts a sequence and step"),
                [line("verify length", "verify_length")],
            )
        )
    return figures


def _distributions(result: dict[str, Any]) -> list[str]:
    columns = result["records"]["columns"]
    rows = [dict(zip(columns, row, strict=True)) for row in result["records"]["rows"]]
    measured = [row for row in rows if row["measured"] and row["outcome"] == "ok" and row["kind"] == "load"]
    figures = []
    for key, label in (("ttft", "TTFT"), ("tpot", "TPOT"), ("e2e", "E2E")):
        values = sorted(1e3 * row[key] for row in measured if row[key] is not None)
        figures.append(
            chart(
                f"{label}: share of requests that were faster",
                Axis("ms"),
                Axis("share", end=1.0, percent=True),
                [Line(label, _steps(values), dots=False)],
            )
        )
    return figures


def _steps(values: Sequence[float]) -> list[tuple[float, float]]:
    """The empirical distribution, thinned out to a few hundred points."""
    count = len(values)
    picked = sorted({round(place * (count - 1) / 300) for place in range(301)}) if count else []
    return [(values[place], (place + 1) / count) for place in picked]


def _by_name(groups: dict[str, Any]) -> str:
    rows = []
    for name, group in groups.items():
        requests, latencies = group["requests"], group["latency_ms"]
        cells = [
            number(latencies[key][share]) if latencies[key] else "-"
            for key in ("ttft", "tpot", "e2e")
            for share in ("p50", "p95")
        ]
        rows.append([name, str(requests["attempted"]), str(requests["error"]), *cells])
    head = ["name", "requests", "failed"]
    head += [f"{key} {share}" for key in ("TTFT", "TPOT", "E2E") for share in ("p50", "p95")]
    return table(head, rows)


def _client(health: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("load processes", ", ".join(f"{share:.1%} of a core" for share in health["cpu_share"]))]
    for key, label in (
        ("send_lag_ms", "sent late by"),
        ("queue_ms", "waited for room in flight"),
        ("loop_lag_ms", "read late by at most"),
    ):
        lag = health[key]
        if lag:
            rows.append((label, f"p50 {lag['p50']:.1f} ms, p99 {lag['p99']:.1f} ms, max {lag['max']:.1f} ms"))
    if "offered_per_second" in health:
        offered, achieved = health["offered_per_second"], health["achieved_per_second"]
        rows.append(("requests/s offered, sent", f"{offered:.2f}, {achieved:.2f}"))
    return rows


def _flat(values: dict[str, Any]) -> list[tuple[str, str]]:
    return [(name.replace("_", " "), str(value)) for name, value in values.items()]
