"""`dspark loadtest sweep`."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from loadtest.client import Target
from loadtest.configurations import NAMES, Configuration, ServerFailed, configuration
from loadtest.curves import knee, rung
from loadtest.files import write_text
from loadtest.flags import add_shared_flags
from loadtest.live import LiveView
from loadtest.observe import LoadFailed, Observation
from loadtest.options import UsageError, fresh_to_the_cache, read_slo, read_workload
from loadtest.plan import Plan
from loadtest.report_text import number, wide_console
from loadtest.run import describe_plan, measure
from loadtest.run_command import shared_fields
from loadtest.saturation import saturated
from loadtest.slo import Slo
from loadtest.sweep import Ladder, Point, Store, SweepError, climb, collect
from loadtest.sweep_report import Sweep, print_sweep, sweep_page
from loadtest.target import TargetError, meet


def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    args = _parser().parse_args(argv)
    say = _Say(Console(stderr=True))
    try:
        slo = read_slo(args)
        swept = _sweep(args, slo, say)
    except (UsageError, OSError) as error:
        print(f"dspark loadtest sweep: {error}", file=sys.stderr)
        return 2
    except (TargetError, LoadFailed, SweepError, ServerFailed) as error:
        print(f"dspark loadtest sweep: {error}", file=sys.stderr)
        return 1
    print_sweep(swept, wide_console())
    if slo is None or not args.fail_on_slo:
        return 0
    knees = {name: knee(rungs, args.attainment) for name, rungs in swept.rungs.items()}
    missed = [name for name, found in knees.items() if found is None or found.passing is None]
    if missed:
        print(f"objective missed at every load by {', '.join(missed)}", file=sys.stderr)
    return 3 if missed else 0


class _Say:
    """Lines about how far the sweep is."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, line: str) -> None:
        self._console.print(Text(line), style="dim", soft_wrap=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dspark loadtest sweep",
        usage="dspark loadtest sweep CONFIG ... --users N ... --output DIR [options]",
        description="Climb a ladder of loads with one or several server configurations, and draw what an "
        "operator decides from. Stopped and started again with the same --output, it goes on.",
        epilog=f"CONFIG: {NAMES} (our server is started with it), URL, NAME=URL, or NAME=FLAGS of "
        "`dspark serve`.",
        allow_abbrev=False,
    )
    text = "server configurations, the baseline first"
    parser.add_argument("configs", nargs="+", metavar="CONFIG", help=text)
    flag = parser.add_argument_group("The ladder").add_argument
    text = "closed loop: so many users (default: 1 2 4 8 16 32)"
    flag("--users", type=int, nargs="+", metavar="N", help=text)
    flag("--rates", type=float, nargs="+", metavar="R", help="open loop: so many arrivals a second")
    flag("--run-time", type=float, default=30.0, metavar="S", help="of each point (default: 30)")
    flag("--warmup", type=float, default=5.0, metavar="S", help="of it, not measured (default: 5)")
    text = "runs of each point, with seeds of their own, in turns (default: 1)"
    flag("--repeats", type=int, default=1, metavar="N", help=text)
    text = "keep all servers of ours up, and measure them in turns at each load"
    flag("--together", action="store_true", help=text)
    flag("--output", required=True, metavar="DIR", help="where everything is kept")
    flag = parser.add_argument_group("Our server").add_argument
    text = "flags of `dspark serve` for every configuration of ours"
    flag("--serve-args", default="", metavar="FLAGS", help=text)
    text = "--speculative-config of those that draft (default: the server's own)"
    flag("--drafting", metavar="JSON", help=text)
    text = "draft model of mtp1, which is left out without it"
    flag("--mtp-drafter", metavar="DIR", help=text)
    add_shared_flags(parser)
    return parser


def _configurations(args: argparse.Namespace, say: _Say) -> list[Configuration]:
    configs = []
    for word in args.configs:
        try:
            found = configuration(word, args.drafting, args.mtp_drafter)
        except ValueError as error:
            raise UsageError(str(error)) from None
        if found is None:
            say("mtp1 is left out: it needs --mtp-drafter, the folder of a trained MTP draft model")
        else:
            configs.append(found)
    if not configs:
        raise UsageError("there is no configuration to measure")
    if len({config.slug for config in configs}) < len(configs):
        raise UsageError("two configurations have the same name")
    return configs


def _ladder(args: argparse.Namespace) -> Ladder:
    if args.users and args.rates:
        raise UsageError("--users and --rates exclude each other")
    loads = args.rates or args.users or [1, 2, 4, 8, 16, 32]
    if min(loads) <= 0:
        raise UsageError("loads must be above 0")
    if args.repeats < 1 or args.processes < 1 or args.spawn_rate <= 0:
        raise UsageError("--repeats, --processes and --spawn-rate must be above 0")
    if args.warmup < 0 or args.warmup + args.cooldown >= args.run_time:
        raise UsageError("--warmup and --cooldown leave nothing of --run-time")
    return Ladder(tuple(float(load) for load in sorted(set(loads))), bool(args.rates), args.burstiness)


def _sweep(args: argparse.Namespace, slo: Slo | None, say: _Say) -> Sweep:
    configs, ladder, workload = _configurations(args, say), _ladder(args), read_workload(args)
    unmet = Target("", args.model or "", args.api_key, timeout=args.timeout)
    template = Plan(unmet, workload, run_time=args.run_time, warmup=args.warmup, **shared_fields(args))
    seeds = [args.seed + place for place in range(args.repeats)]
    settings = describe_plan(ladder.plan(template, ladder.loads[0], 0))
    settings = {name: value for name, value in settings.items() if name not in ("users", "rate", "seed")}
    settings |= {"prompts_from": sorted([*args.prompts, args.data or ""]), "slo": str(slo) if slo else None}
    ours = all(config.url is None for config in configs)
    how = args.prefix_cache or ("salt" if ours else "keep" if args.scenario else "text")
    further = "model", "serve_args", "seeded", "prefix_tokens", "drain", "timeout"
    settings |= {name: getattr(args, name) for name in further} | {"system": workload.system, "fresh": how}
    if args.scenario is not None:
        settings["scenario"] = sha256(Path(args.scenario).read_bytes()).hexdigest()
    if args.together:
        settings["together"] = True
    try:
        serve_args = shlex.split(args.serve_args)
    except ValueError as error:
        raise UsageError(f"--serve-args: {error}") from None
    store = Store(Path(args.output), settings)
    points = len(configs) * len(ladder.loads) * len(seeds)
    say(f"{points} points, about {points * (args.run_time + 4) / 60:.0f} minutes and the servers' starts")

    def measure_point(point: Point, url: str) -> dict[str, Any]:
        fresh = fresh_to_the_cache(workload, how, url)
        target = meet(
            url, fresh.endpoint, fresh.body, model=args.model, api_key=args.api_key, timeout=args.timeout
        )
        plan = replace(ladder.plan(template, point.load, point.seed), target=target, workload=fresh)
        label = f"{point.config.name}, {point.load:g} {ladder.unit}, seed {point.seed}"
        with LiveView(plan, slo, label, args.quiet) as view:

            def watch(seen: Observation) -> str | None:
                view.show(seen)
                return saturated(seen) if ladder.open_loop else None

            result = measure(plan, slo, label, args.scrape_interval, watch).result
        if result["cut_short"] == "interrupted":
            raise KeyboardInterrupt
        say(f"{label}: {_told(result)}")
        return result

    climb(configs, ladder, seeds, store, measure_point, serve_args, say, args.together)
    found = collect(configs, ladder, seeds, store)
    rungs = {name: [rung(load, runs) for load, runs in loads.items()] for name, loads in found.items()}
    first = next(run for loads in found.values() for runs in loads.values() for run in runs)
    swept = Sweep(rungs, ladder.unit, str(slo) if slo else None, args.attainment, first)
    folder = Path(args.output)
    raw = {
        "kind": "sweep",
        "unit": ladder.unit,
        "slo": str(slo) if slo else None,
        "attainment": args.attainment,
        "settings": settings,
        "points": {
            name: {f"{load:g}": [_lean(run) for run in runs] for load, runs in loads.items()}
            for name, loads in found.items()
        },
    }
    write_text(folder / "sweep.json", json.dumps(raw, allow_nan=False) + "\n")
    write_text(folder / "sweep.html", sweep_page(swept))
    say(f"written: {folder / 'sweep.html'}, {folder / 'sweep.json'}")
    return swept


def _told(result: dict[str, Any]) -> str:
    through = result["throughput"]
    line = (
        f"{number(through['output_tokens_per_second'])} tok/s, "
        f"{number(through['tokens_per_second_per_user'])} tok/s/user"
    )
    if result.get("slo"):
        line += f", {number(100 * (result['slo']['attainment'] or 0.0), 0)} % good"
    return line + (", DEGRADED" if result["health"]["degraded"] else "")


def _lean(result: dict[str, Any]) -> dict[str, Any]:
    """Without what is as long as the run; that stays in the point's own file."""
    return {name: value for name, value in result.items() if name not in ("records", "series")}
