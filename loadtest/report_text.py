"""The result of a run as tables in the terminal."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_LATENCIES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl_chunk": "ITL per chunk",
    "itl_token": "ITL per token",
    "e2e": "E2E",
}
PERCENTILES = ("p50", "p90", "p95", "p99")


def number(value: float | None, digits: int = 1) -> str:
    """A figure for a table; a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def with_margin(mean: float | None, margin: float | None, digits: int = 1) -> str:
    """12.3 ± 0.4"""
    return number(mean, digits) + (f" ± {number(margin, digits)}" if margin is not None else "")


def latency_rows(latencies: dict[str, Any]) -> list[list[str]]:
    """A row a metric: name, mean with margin, percentiles (a star: the sample cannot support it), largest."""
    rows = []
    for key, label in _LATENCIES.items():
        figures = latencies.get(key)
        if figures is None:
            rows.append([label, *["-"] * (len(PERCENTILES) + 2)])
            continue
        marked = [number(figures[name]) + "*" * (name in figures["unsupported"]) for name in PERCENTILES]
        mean = with_margin(figures["mean"], figures.get("margin"))
        rows.append([label, mean, *marked, number(figures["max"])])
    return rows


def facts(result: dict[str, Any]) -> list[tuple[str, str]]:
    """Everything but latencies, as name and value."""
    requests, through, tokens = result["requests"], result["throughput"], result["tokens"]
    rows = [
        (
            "requests attempted",
            f"{requests['attempted']}: {requests['ok']} ok, {requests['error']} failed, "
            f"{requests['unfinished']} unfinished" + _cancelled(requests),
        ),
        ("requests/s", number(through["requests_per_second"], 2)),
        (
            "output tokens/s",
            with_margin(through["output_tokens_per_second"], through["output_tokens_per_second_margin"]),
        ),
        ("prompt tokens/s", number(through["prompt_tokens_per_second"])),
        ("tokens/s/user", number(through["tokens_per_second_per_user"])),
        (
            "in flight",
            f"{number(through['mean_in_flight'])} on average, {through['peak_in_flight']} at most",
        ),
    ]
    if "tokens_per_chunk" in result["latency_ms"]:
        rows.append(("tokens per chunk", number(result["latency_ms"]["tokens_per_chunk"]["mean"], 2)))
    if result["latency_ms"]["tokens_are_chunks"]:
        rows.append(("tokens", "the server does not count them: each chunk is taken for one"))
    if requests["wrong_length"]:
        rows.append(("outputs of another length than asked for", str(requests["wrong_length"])))
    slo = result.get("slo")
    if slo is not None:
        each = ", ".join(f"{name} {_share(share)}" for name, share in slo["by_limit"].items())
        rows += [
            (f"attainment of {slo['limits']}", f"{_share(slo['attainment'])} of attempted ({each})"),
            (
                "goodput",
                f"{number(slo['goodput_requests_per_second'], 2)} requests/s, "
                f"{number(slo['goodput_tokens_per_second'])} tokens/s",
            ),
        ]
    if "probes" in result:
        e2e = result["probes"]["e2e_ms"]
        told = f"p50 {number(e2e['p50'])} ms, max {number(e2e['max'])} ms" if e2e else "none completed"
        rows.append(("probes beside the load", told))
    if "server_generated" in tokens:
        verdict = "as the server counts" if tokens["agree"] else "BUT THE SERVER COUNTS OTHERWISE"
        line = f"{tokens['completed']:,} of completed requests, {verdict}"
        if tokens["cut_off"] or tokens["server_generated_for_cut_off"]:
            line += (
                f"; of those cut off {tokens['cut_off']:,} delivered, "
                f"{tokens['server_generated_for_cut_off']:,} generated"
            )
        rows.append(("output tokens in the whole run", line))
    return rows + server_facts(result.get("server"))


def server_facts(server: dict[str, Any] | None) -> list[tuple[str, str]]:
    """What the server says of the measured span, as far as it does."""
    if server is None:
        return [("server's figures", "none: no /metrics")]
    rows = []
    if "acceptance_rate" in server:
        rows.append(("server: drafts accepted", f"{server['acceptance_rate']:.1%} of those verified"))
    if "accepted_length" in server:
        rows.append(("server: tokens per verified draft", number(server["accepted_length"], 2)))
    if "verify_length" in server:
        rows.append(("server: verify length", number(server["verify_length"], 2)))
    if "mean_step_ms" in server:
        rows.append(("server: step", f"{number(server['mean_step_ms'])} ms"))
    if "forecast_over_measured_seconds" in server:
        seconds, tokens = server["forecast_over_measured_seconds"], server["forecast_over_measured_tokens"]
        rows.append(("server: forecast over measured", f"seconds {seconds:.2f}, tokens {tokens:.2f}"))
    for name in ("preemptions", "rejections", "cached"):
        if server.get(name):
            rows.append((f"server: {'prompt tokens ' if name == 'cached' else ''}{name}", str(server[name])))
    return rows


def print_result(result: dict[str, Any], console: Console) -> None:
    """All of it, with a loud line if the run was degraded or cut short."""
    window = result["window"]
    measured = f"{window['seconds']:.1f} s measured of {window['run_seconds']:.1f} s"
    console.print(f"\n[bold]{result['label']}[/bold]: {measured}", highlight=False)
    table = Table("ms", "mean", *PERCENTILES, "max")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in latency_rows(result["latency_ms"]):
        table.add_row(*row)
    console.print(table)
    if any(figures and figures.get("unsupported") for figures in _groups(result["latency_ms"])):
        console.print("* too few requests to say this with 95 % confidence", style="dim", highlight=False)
    grid = Table.grid(padding=(0, 2))
    for name, value in facts(result):
        grid.add_row(name, Text(value))
    console.print(grid)
    for kind, count in sorted(result["errors"].items(), key=lambda item: -item[1]):
        console.print(Text(f"  {count} x {kind}", style="red"))
    for reason in result["health"]["degraded"]:
        console.print(Text(f"DEGRADED, the client was too slow: {reason}", style="bold red"))
    if result["cut_short"]:
        console.print(Text(f"cut short: {result['cut_short']}", style="yellow"))


def _groups(latencies: dict[str, Any]) -> list[dict[str, Any] | None]:
    return [latencies.get(key) for key in _LATENCIES]


def _cancelled(requests: dict[str, Any]) -> str:
    return f"; {requests['cancelled']} more cancelled on purpose" if requests["cancelled"] else ""


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def wide_console() -> Console:
    """Where tables are printed; a file or a pipe takes them wider than rich would guess."""
    return Console(width=None if sys.stdout.isatty() else 140)
