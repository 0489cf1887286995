"""One run from end to end: load, server's figures, summary, as one JSON-ready result."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from loadtest.health import client_health
from loadtest.observe import Observation, Watcher, observe
from loadtest.plan import Plan
from loadtest.record import Record
from loadtest.scrape import Scraper, truth
from loadtest.series import over_time
from loadtest.slo import Slo
from loadtest.summary import Window, summarize
from loadtest.target import describe

VERSION = 1  # of the JSON's layout

_COLUMNS = (
    "name", "kind", "outcome", "intended", "ttft", "tpot", "e2e", "tokens", "prompt_tokens", "cached_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Measured:
    """The result for files and comparisons, and what it was made of."""

    result: dict[str, Any]
    window: Window
    observation: Observation


def measure(plan: Plan, slo: Slo | None, label: str, scrape_interval: float, watcher: Watcher) -> Measured:
    """Run `plan` and summarize it. Raises LoadFailed."""
    server = describe(plan.target.url)
    scraper = Scraper(plan.target.url, scrape_interval) if scrape_interval > 0 else None
    before = time.perf_counter()
    try:
        seen = observe(plan, watcher)
    finally:
        scrapes = scraper.stop() if scraper is not None else []
    window = window_of(plan, seen)
    wall = seen.end - seen.begin
    result: dict[str, Any] = {
        "kind": "run",
        "version": VERSION,
        "label": label,
        "time": datetime.fromtimestamp(seen.wall_begin, UTC).isoformat(timespec="seconds"),
        "client": {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cpus": os.cpu_count(),
        },
        "target": {"url": plan.target.url, "model": plan.target.model, "server": server},
        "load": describe_plan(plan),
        "window": {"begin": window.begin - seen.begin, "seconds": window.seconds, "run_seconds": wall},
        "cut_short": seen.cut_short,
    }
    result |= summarize(seen.records, window, slo)
    result["health"] = client_health(
        [record for record in seen.records if record.kind == "load"],
        seen.ticks,
        seen.cpu_seconds,
        wall,
        window,
        not plan.closed,
    )
    result["server"] = truth(scrapes, window.begin, window.end)
    if scrapes and scrapes[-1].time > seen.end:  # else the last look failed, and some tokens are not in it
        result["tokens"] |= reconcile(truth([scrapes[0], scrapes[-1]], before, seen.end), result["tokens"])
    result["series"] = over_time(seen.records, seen.ticks, scrapes, seen.begin, seen.end)
    result["records"] = {
        "columns": [*_COLUMNS, "measured"],
        "rows": [_row(record, seen.begin, window) for record in seen.records],
    }
    return Measured(result, window, seen)


def window_of(plan: Plan, seen: Observation) -> Window:
    """The measured span.

    Of a timed run until requests were no longer due, or the last one ended if there were no more; else until
    the last one ended.
    """
    load = [record for record in seen.records if record.kind == "load"]
    end = max((record.ended for record in load if record.ended is not None), default=seen.end)
    if seen.cut_short is not None:  # requests were no longer sent from some moment on
        end = max((record.started for record in load), default=end)
    elif plan.length is not None:
        planned = seen.begin + plan.length
        end = min(planned, end) if plan.requests is not None or plan.trace else planned
    begin = min(seen.begin + plan.warmup, end)
    return Window(begin, max(begin, end - plan.cooldown))


def reconcile(whole: dict[str, Any] | None, counted: dict[str, int]) -> dict[str, Any]:
    """The server's count of generated tokens over the whole run beside ours.

    What it generated beyond the completed requests belongs to those that were cut off, which may have got
    less of it than was generated. Another client at the same time makes the figures meaningless.
    """
    if whole is None or "generated" not in whole:
        return {}
    rest = whole["generated"] - counted["completed"]
    return {
        "server_generated": whole["generated"],
        "server_generated_for_cut_off": rest,
        "agree": rest == 0 if counted["cut_off"] == 0 else rest >= counted["cut_off"],
    }


def describe_plan(plan: Plan) -> dict[str, Any]:
    """What was sent, for the reader of a report."""
    work = plan.workload
    prompts = "words" if not work.prompts else f"{len(work.prompts)} prompts"
    out: dict[str, Any] = {
        "loop": "closed" if plan.closed else "open",
        "users": plan.users,
        "rate": plan.open_loop.rate if plan.open_loop else None,
        "rate_to": plan.open_loop.rate_to if plan.open_loop else None,
        "burstiness": str(plan.open_loop.burstiness) if plan.open_loop else None,
        "trace": len(plan.trace) or None,
        "run_time": plan.length,
        "requests": plan.requests,
        "warmup": plan.warmup,
        "cooldown": plan.cooldown,
        "max_in_flight": plan.max_in_flight,
        "probe_rate": plan.probe_rate or None,
        "seed": plan.seed,
        "scenario": os.path.basename(plan.scenario) if plan.scenario else None,
    }
    if plan.scenario is None:
        out |= {
            "endpoint": work.endpoint,
            "prompts": "trace" if plan.trace else prompts,
            "weights": dict(work.weights) or None,
            "input_tokens": None if work.prompts or plan.trace else str(work.input_tokens),
            "output_tokens": str(work.output_tokens),
            "ignore_eos": work.ignore_eos or None,
            "turns": work.turns,
            "shared_prefixes": work.shared_prefixes or None,
            "cancel_share": work.cancel_share or None,
            "think": list(work.think) if any(work.think) else None,
        }
    out["body"] = {name: value for name, value in work.body.items() if name != "cache_salt"} or None
    return {name: value for name, value in out.items() if value is not None}


def _row(record: Record, begin: float, window: Window) -> list[Any]:
    def short(value: float | None) -> float | None:
        return None if value is None else round(value, 6)

    return [
        record.name,
        record.kind,
        record.outcome,
        short(record.intended - begin),
        short(record.ttft),
        short(record.tpot),
        short(record.e2e),
        record.tokens,
        record.prompt_tokens,
        record.cached_tokens,
        window.holds(record.intended),
    ]
