"""`dspark loadtest run`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.arrivals import OpenLoop, Timed, read_trace
from loadtest.files import write_text
from loadtest.flags import add_shared_flags
from loadtest.live import LiveView
from loadtest.observe import LoadFailed, Observation
from loadtest.options import UsageError, fresh_to_the_cache, read_slo, read_workload
from loadtest.plan import Plan
from loadtest.report_csv import write_csv
from loadtest.report_html import run_page
from loadtest.report_text import print_result, wide_console
from loadtest.run import Measured, measure
from loadtest.scenario import load_scenario
from loadtest.slo import Slo
from loadtest.target import TargetError, meet

_POSITIVE = (
    "users", "rate", "rate_to", "run_time", "requests", "spawn_rate", "burstiness", "max_in_flight",
    "processes",
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        slo = read_slo(args)
        measured = _measure(args, slo)
        _write(args, measured)
    except (UsageError, OSError) as error:
        print(f"dspark loadtest run: {error}", file=sys.stderr)
        return 2
    except (TargetError, LoadFailed) as error:
        print(f"dspark loadtest run: {error}", file=sys.stderr)
        return 1
    print_result(measured.result, wide_console())
    if slo is None or not args.fail_on_slo:
        return 0
    reached = measured.result["slo"]["attainment"] or 0.0
    if reached >= args.attainment:
        return 0
    told = f"{reached:.1%} of requests kept {slo}, not {args.attainment:.1%}"
    print(f"objective missed: {told}", file=sys.stderr)
    return 3


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dspark loadtest run",
        usage="dspark loadtest run URL [options]",
        description="Put load on an OpenAI-compatible server and report what its users see.",
        allow_abbrev=False,
    )
    parser.add_argument("url", metavar="URL", help="http://HOST:PORT")
    flag = parser.add_argument_group("How much load").add_argument
    text = "closed loop: so many users, one request each at a time (default: 1)"
    flag("--users", type=int, metavar="N", help=text)
    text = "open loop: so many arrivals a second, whatever becomes of them"
    flag("--rate", type=float, metavar="R", help=text)
    flag("--rate-to", type=float, metavar="R", help="rise or fall to this rate over the run")
    text = (
        'open loop: JSONL with "at" in seconds (or "timestamp" in ms), "prompt" or "input_length", '
        '"output_length", "hash_ids"'
    )
    flag("--trace", metavar="FILE", help=text)
    flag("--run-time", type=float, metavar="S", help="measure for so many seconds (default: 30)")
    flag("--requests", type=int, metavar="N", help="send so many requests; open loop: arrivals")
    text = "do not measure the first seconds (default: of a timed run, until all users have joined)"
    flag("--warmup", type=float, metavar="S", help=text)
    add_shared_flags(parser)
    out = parser.add_argument_group("Reports")
    out.add_argument("--json", metavar="FILE", help="everything, for `compare` and for programs")
    out.add_argument("--html", metavar="FILE", help="a page with charts that needs nothing else")
    out.add_argument("--csv", metavar="PREFIX", help="locust's files: PREFIX_stats.csv and others")
    out.add_argument("--label", metavar="TEXT", help="what to call the run (default: its load)")
    text = "give the server so long to come up"
    parser.add_argument("--wait", type=float, default=0.0, metavar="S", help=text)
    return parser


def plan_load(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a plan that say how much load. Raises UsageError or OSError."""
    kinds = [name for name in ("users", "rate", "trace") if getattr(args, name) is not None]
    if len(kinds) > 1:
        raise UsageError(f"--{kinds[0]} and --{kinds[1]} exclude each other")
    users = 1 if not kinds else args.users
    for name in _POSITIVE:
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise UsageError(f"--{name.replace('_', '-')} must be above 0")
    if args.rate_to is not None and args.rate is None:
        raise UsageError("--rate-to needs --rate")
    trace: list[Timed] = []
    if args.trace is not None:
        try:
            trace = read_trace(Path(args.trace))
        except ValueError as error:
            raise UsageError(f"--trace {error}") from None
    run_time = args.run_time
    if run_time is None and args.requests is None and not trace:
        run_time = 30.0
    joined = (users - 1) / args.spawn_rate if users is not None and run_time is not None else 0.0
    warmup = args.warmup if args.warmup is not None else joined
    if run_time is not None and warmup + args.cooldown >= run_time:
        raise UsageError(f"--run-time {run_time:g} leaves nothing to measure after {warmup:g} s of warm-up")
    return {
        "users": users,
        "open_loop": OpenLoop(args.rate, args.rate_to, args.burstiness) if args.rate is not None else None,
        "trace": tuple(trace),
        "run_time": run_time,
        "requests": args.requests,
        "warmup": warmup,
    }


def shared_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of a plan that a run and a sweep take straight from their flags."""
    names = (
        "spawn_rate",
        "cooldown",
        "drain",
        "max_in_flight",
        "probe_rate",
        "seed",
        "processes",
        "scenario",
    )
    return {name: getattr(args, name) for name in names}


def _measure(args: argparse.Namespace, slo: Slo | None) -> Measured:
    load, workload = plan_load(args), read_workload(args)
    if args.scenario is not None:
        try:
            load_scenario(Path(args.scenario))
        except ValueError as error:
            raise UsageError(f"--scenario {error}") from None
    workload = fresh_to_the_cache(workload, args.prefix_cache or "keep", args.url)
    target = meet(
        args.url,
        workload.endpoint,
        workload.body,
        model=args.model,
        api_key=args.api_key,
        timeout=args.timeout,
        wait=args.wait,
    )
    plan = Plan(target, workload, **load, **shared_fields(args))
    label = args.label or _label(plan)
    with LiveView(plan, slo, label, args.quiet) as view:

        def watch(seen: Observation) -> str | None:
            view.show(seen)
            return None

        return measure(plan, slo, label, args.scrape_interval, watch)


def _label(plan: Plan) -> str:
    if plan.users is not None:
        return f"{plan.users} user{'s' * (plan.users > 1)}"
    if plan.open_loop is not None:
        rising = f" to {plan.open_loop.rate_to:g}" if plan.open_loop.rate_to is not None else ""
        return f"{plan.open_loop.rate:g}{rising} requests/s"
    return f"trace of {len(plan.trace)} requests"


def _write(args: argparse.Namespace, measured: Measured) -> None:
    if args.json:
        write_text(Path(args.json), json.dumps(measured.result, allow_nan=False) + "\n")
    if args.html:
        write_text(Path(args.html), run_page(measured.result))
    if args.csv:
        write_csv(args.csv, measured.observation, measured.window)
