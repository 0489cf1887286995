"""`dspark profile`: what a step costs on this machine, as the scheduler sees it; printed and plotted."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from server.options import SettingsError, add_flags, load

_OWN = ("fresh", "json", "png")


def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code."""
    from drafters.evaluation.plots import can_plot, cost_curves
    from engine.outputs import NullObserver
    from server.wiring import BadSettings, build_parts

    options = vars(_parser().parse_args(argv))
    own = {name: options.pop(name) for name in _OWN}
    try:
        settings = load(options)
        if own["png"] and not can_plot():
            raise ValueError("--png needs matplotlib: pip install matplotlib")
        parts = build_parts(settings, NullObserver(), lambda line: print(line, file=sys.stderr))
        model = parts.profile(own["fresh"])
    except (SettingsError, BadSettings, OSError, ValueError) as error:
        print(f"dspark profile: {error}", file=sys.stderr)
        return 1
    _show(model)
    if own["json"]:
        content = {"engine": parts.info, "throughput": model.to_dict()}
        Path(own["json"]).write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    if own["png"]:
        cost_curves(model, Path(own["png"]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dspark profile",
        usage="dspark profile [MODEL] [options]",
        description="Show what a step costs here, which is what verification lengths are chosen by.",
        allow_abbrev=False,
    )
    group = parser.add_argument_group("Profile")
    group.add_argument("--fresh", action="store_true", help="measure again, whatever is known from before")
    group.add_argument("--json", metavar="FILE", help="write the curves there as well")
    group.add_argument("--png", metavar="FILE", help="draw them")
    add_flags(parser)
    return parser


def _show(model: Any) -> None:
    print("rows verified      ms   SPS  tokens/s at most")
    for rows, seconds in model.verify.to_list():
        print(f"{rows:>13.0f} {1e3 * seconds:>7.2f} {1 / seconds:>5.1f} {rows / seconds:>17.0f}")
    if any(model.draft.seconds):
        print("tokens drafted     ms")
        for tokens, seconds in model.draft.to_list():
            print(f"{tokens:>14.0f} {1e3 * seconds:>6.2f}")
    each = f"{1e9 * model.per_context:.1f} ns"
    print(f"and {each} for each token that attention reads beyond {model.context:.0f}")
