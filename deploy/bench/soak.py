"""Mixed traffic for a long time: is every text right, does anything leak, do the counters reconcile?

    .venv/bin/python -m deploy.bench.soak [--minutes 20] [--users 10] [--output FILE] [--png FILE]

Texts are first asked for alone and without drafts; under load, with drafts and beside clients that hang up,
send rubbish or read slowly, they must be the same. Now and then the traffic pauses until the server is idle:
then pages, tasks, open files and memory are counted. Exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from deploy.bench.figures import Figures
from deploy.bench.soak_traffic import Traffic
from loadtest.configurations import Configuration, running, serve_command

TEXTS = range(56)
REST = 60.0  # seconds between pauses
#: growth of memory, in the second half, that is no leak: caches fill, the allocator fragments
GROWTH = 0.03


def main() -> int:
    options = _parser().parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--max-model-len", "512", "--num-pages", str(options.pages))
        command = serve_command(Configuration("soak", flags=flags), ())
        with running(command, Path(folder) / "serve.log") as url:
            result = asyncio.run(_soak(url, options))
    print(json.dumps({key: value for key, value in result.items() if key != "idle"}, indent=1))
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.png:
        _plot(result["idle"], options.png)
    return 1 if result["wrong"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--users", type=int, default=10)
    parser.add_argument("--pages", type=int, default=36, help="so few that some lose theirs (default: 36)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--png", metavar="FILE", help="draw memory, files and tasks over time")
    return parser


async def _soak(url: str, options: argparse.Namespace) -> dict[str, Any]:
    traffic = Traffic()
    async with traffic.client(url, options.users):
        await traffic.know(TEXTS)
    begin = time.monotonic()
    idle = [await _idle(url, begin)]
    pick = random.Random(options.seed)
    while (passed := time.monotonic() - begin) < 60 * options.minutes:
        until = time.monotonic() + min(REST, 60 * options.minutes - passed)
        users = [random.Random(pick.random()) for _ in range(options.users)]
        async with traffic.client(url, options.users):  # its connections end before they are counted
            await asyncio.gather(*(_user(traffic, each, until) for each in users))
        idle.append(await _idle(url, begin))
        print(f"{idle[-1]} sent {sum(traffic.kinds.values())} wrong {len(traffic.wrong)}", file=sys.stderr)
    return _judge(traffic, idle, Figures(url))


async def _user(traffic: Traffic, pick: random.Random, until: float) -> None:
    while time.monotonic() < until:
        await traffic.one(pick)
        await asyncio.sleep(pick.random() * 0.2)


async def _idle(url: str, begin: float) -> dict[str, float]:
    """Wait until nothing runs, then count."""
    for _ in range(600):
        if not (await asyncio.to_thread(Figures, url)).busy:
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(1.0)  # connections of those who left are closed a moment later
    seen = await asyncio.to_thread(Figures, url)
    counts = {"files": seen.files, "tasks": seen.tasks, "busy": seen.busy, "leaked_pages": seen.leaked_pages}
    return {
        "minute": round((time.monotonic() - begin) / 60, 2),
        "memory_mib": round(seen.memory, 1),
        **counts,
    }


def _judge(traffic: Traffic, idle: list[dict[str, float]], last: Figures) -> dict[str, Any]:
    wrong = list(traffic.wrong)
    for seen in idle:
        if seen["busy"] or seen["leaked_pages"]:
            wrong.append(f"not idle, or pages lost: {seen}")
    half = idle[len(idle) // 2]
    growth = idle[-1]["memory_mib"] / half["memory_mib"] - 1.0
    if growth > GROWTH:
        wrong.append(f"memory grew by {growth:.1%} in the second half")
    for name, slack in (("files", 2), ("tasks", 2)):
        if idle[-1][name] > half[name] + slack:
            wrong.append(f"{name}: {half[name]} after half the time, {idle[-1][name]} at the end")
    counted = {
        str(status): int(last.get("http_requests_total", path="/v1/chat/completions", status=str(status)))
        + int(last.get("http_requests_total", path="/v1/completions", status=str(status)))
        for status in sorted(traffic.statuses)
    }
    for status, count in traffic.statuses.items():
        # Who leaves in the midst of a reply has seen a 200, who leaves before it has not; the server may
        # have been done with either.
        least, most = (-traffic.kinds["gone"], traffic.kinds["cancelled"]) if status == 200 else (0, 0)
        if not least <= count - counted[str(status)] <= most:
            wrong.append(f"status {status}: {count} seen here, {counted[str(status)]} counted there")
    generated = int(last.get("generation_tokens_total"))
    if generated < traffic.delivered:
        wrong.append(f"{traffic.delivered} tokens came, {generated} were generated")
    return {
        "kinds": dict(traffic.kinds),
        "statuses_here": {str(status): count for status, count in sorted(traffic.statuses.items())},
        "statuses_there": counted,
        "cancelled_there": int(last.get("cancelled_requests_total")),
        "preemptions": int(last.get("num_preemptions_total")),
        "tokens_delivered": traffic.delivered,
        "tokens_generated": generated,
        "memory_growth_second_half": round(growth, 4),
        "wrong": wrong[:20],
        "idle": idle,
    }


def _plot(idle: list[dict[str, float]], path: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    for axis, name in zip(figure.subplots(1, 3), ("memory_mib", "files", "tasks"), strict=True):
        axis.plot([seen["minute"] for seen in idle], [seen[name] for seen in idle], marker=".")
        axis.set(xlabel="minute", title=name.replace("_mib", ", MiB"), ylim=(0, None))
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    raise SystemExit(main())
