"""Beyond capacity: goodput up to ten times what the server can do, refusals, probes, memory, recovery.

    .venv/bin/python -m deploy.bench.overload [--run-time 45] [--queue-wait 4] [--output FILE]

A closed loop with more users than seats finds the capacity in requests a second; then Poisson arrivals at
shares and multiples of it, with prompts that are new to the server. Beside the load, /health is asked five
times a second. What counts as good is written into the result.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from deploy.bench.figures import Figures
from loadtest.configurations import Configuration, running, serve_command
from loadtest.stats import percentile

FACTORS = (0.5, 0.8, 1.0, 2.0, 5.0, 10.0)
WORK = ("--output-tokens", "48", "--temperature", "1", "--prefix-cache", "text", "--quiet")


def main() -> int:
    options = _parser().parse_args()
    flags = ("--max-queue-wait", str(options.queue_wait))
    with tempfile.TemporaryDirectory() as folder:
        command = serve_command(Configuration("overload", flags=flags), ())
        with running(command, Path(folder) / "serve.log") as url:
            result = _measure(url, Path(folder), options)
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--run-time", type=float, default=45.0, help="seconds a rate (default: 45)")
    parser.add_argument("--queue-wait", type=float, default=4.0, help="--max-queue-wait (default: 4)")
    parser.add_argument(
        "--slo", nargs="+", default=["ttft:8000", "tpot:250"], help="what a good request keeps"
    )
    parser.add_argument("--factors", nargs="+", type=float, default=FACTORS, help="of the capacity")
    parser.add_argument("--output", metavar="FILE", help="write the figures as JSON")
    return parser


def _measure(url: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    _load(url, folder, ["--users", "4", "--run-time", "5"])
    alone = _first_token(url)
    seconds = ["--run-time", str(options.run_time), "--warmup", "8"]
    full = _load(url, folder, ["--users", "48", *seconds])
    capacity = full["throughput"]["requests_per_second"]
    print(f"capacity: {capacity:.2f} requests/s; first token alone: {alone:.3f} s", flush=True)
    rows = []
    for factor in options.factors:
        pace = ["--rate", f"{factor * capacity:.3f}", "--slo", *options.slo]
        with Prober(url) as prober:
            run = _load(url, folder, [*pace, *seconds])
        rows.append({"factor": factor, **_row(run), **prober.row(), "memory_mib": Figures(url).memory})
        rows[-1]["recovery_s"] = _recovery(url, alone)
        print(json.dumps({key: _short(value) for key, value in rows[-1].items()}), flush=True)
    best = max(row["goodput"] for row in rows)
    last = rows[-1]
    print(f"goodput at {last['factor']:g} times the capacity: {last['goodput'] / best:.2f} of its peak")
    told = {"slo": options.slo, "queue_wait": options.queue_wait}
    return {**told, "capacity": capacity, "first_token_alone": alone, "rows": rows}


def _load(url: str, folder: Path, flags: Sequence[str]) -> dict[str, Any]:
    file = folder / "run.json"
    command = [sys.executable, "-m", "loadtest", "run", url, *flags, *WORK, "--json", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result


def _row(run: dict[str, Any]) -> dict[str, Any]:
    columns = run["records"]["columns"]
    rows = [dict(zip(columns, row, strict=True)) for row in run["records"]["rows"]]
    refused = sorted(1e3 * row["e2e"] for row in rows if row["outcome"] == "error" and row["measured"])
    return {
        "rate": run["load"]["rate"],
        "goodput": run["slo"]["goodput_requests_per_second"],
        "good_of_accepted": run["slo"]["good"] / max(1, run["requests"]["ok"]),
        "ok": run["requests"]["ok"],
        "errors": run["errors"],
        "refused_p50_ms": percentile(refused, 0.5) if refused else None,
        "refused_p99_ms": percentile(refused, 0.99) if refused else None,
        "ttft_p95_ms": (run["latency_ms"]["ttft"] or {}).get("p95"),
        "tpot_p95_ms": (run["latency_ms"]["tpot"] or {}).get("p95"),
        "degraded": run["health"]["degraded"],
    }


class Prober:
    """Asks /health while a load runs."""

    def __init__(self, url: str) -> None:
        self._url, self._times, self._over = url, [], threading.Event()  # type: ignore[var-annotated]
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Prober:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=30.0) as http:
            while not self._over.wait(0.2):
                begun = time.perf_counter()
                http.get("/health").raise_for_status()
                self._times.append(1e3 * (time.perf_counter() - begun))

    def row(self) -> dict[str, float]:
        times = sorted(self._times)
        return {"health_p50_ms": percentile(times, 0.5), "health_p99_ms": percentile(times, 0.99)}


def _first_token(url: str) -> float:
    """Seconds for one token of a new prompt, the median of five."""
    times = []
    for _ in range(5):
        begun = time.perf_counter()
        body = {"prompt": f"{time.time_ns()}: the capital of France is", "max_tokens": 1}
        httpx.post(f"{url}/v1/completions", json=body, timeout=120.0).raise_for_status()
        times.append(time.perf_counter() - begun)
    return sorted(times)[2]


def _recovery(url: str, alone: float) -> float:
    """Seconds until the server is as quick as it was alone (twice as long is quick enough)."""
    begun = time.perf_counter()
    while Figures(url).busy or _first_token(url) > 2 * alone:
        time.sleep(0.1)
    return time.perf_counter() - begun


def _short(value: Any) -> Any:
    return float(f"{value:.3g}") if isinstance(value, float) else value


if __name__ == "__main__":
    raise SystemExit(main())
