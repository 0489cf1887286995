"""What the waves of `deploy.bench.policies` say: ratios with intervals, the envelope, a plot."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from drafters.evaluation.plots import can_plot

Row = dict[str, Any]

FIELDS = (
    "round", "point", "policy", "prompts", "seconds", "tokens", "tokens_per_second", "ttft", "verify_length",
    "slots", "tau", "step_error", "forecast_tokens_per_second", "measured_tokens_per_second",
)  # fmt: skip
OURS = "lookahead"
#: two-sided 95 % points of Student's t by degrees of freedom
_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


def report(rows: Sequence[Row], engine: dict[str, Any], folder: Path) -> str:
    """Write policies.json and policies.png; returns the table as text."""
    points = {point: _point([row for row in rows if row["point"] == point]) for point in _points(rows)}
    others = {policy for each in points.values() for policy in each["policies"]}
    overall = {
        policy: math.exp(mean(math.log(each["policies"][policy]["over_off"][0]) for each in points.values()))
        for policy in sorted(others)
        if all(policy in each["policies"] for each in points.values())
    }
    content = {"engine": engine, "points": points, "geometric_mean_over_off": overall}
    text = json.dumps(content, indent=1, default=str)
    (folder / "policies.json").write_text(text + "\n", encoding="utf-8")
    if can_plot():
        _plot(points, folder / "policies.png")
    return _table(points, overall)


def _points(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["point"] for row in rows))


def _point(rows: Sequence[Row]) -> dict[str, Any]:
    computed = [row for row in rows if row["prompts"] == "computed"]
    policies = sorted({row["policy"] for row in computed})  # waves come in random order
    out = {}
    for policy in policies:
        mine = [row for row in computed if row["policy"] == policy]
        out[policy] = {
            "tokens_per_second": mean(row["tokens_per_second"] for row in mine),
            "over_off": _ratio(computed, policy, "off", "tokens_per_second"),
            "ours_over_it": _ratio(computed, OURS, policy, "tokens_per_second"),
            **{name: mean(row[name] for row in mine) for name in ("verify_length", "slots", "tau")},
            "step_error": median(row["step_error"] for row in mine),
            "forecast_over_measured": median(
                row["forecast_tokens_per_second"] / row["measured_tokens_per_second"]
                for row in mine
                if row["measured_tokens_per_second"]
            )
            if policy != "off"
            else None,
        }
    # The best of the even rounds, judged on the odd ones, or it would be the luckiest.
    even = [row for row in computed if row["round"] % 2 == 0]
    best = max(policies, key=lambda policy: _mean_of(even, policy))
    odd = [row for row in computed if row["round"] % 2] or even
    new = [row for row in rows if row["prompts"] == "new"]
    return {
        "rounds": len({row["round"] for row in computed}),
        "policies": out,
        "best_of_half": best,
        "ours_over_best": _ratio(odd, OURS, best, "tokens_per_second"),
        "new_prompts": {
            "over_off": _ratio(new, OURS, "off", "tokens_per_second"),
            "ttft_over_off": _ratio(new, OURS, "off", "ttft"),
        },
    }


def _mean_of(rows: Sequence[Row], policy: str) -> float:
    return mean(math.log(row["tokens_per_second"]) for row in rows if row["policy"] == policy)


def _ratio(rows: Sequence[Row], above: str, below: str, name: str) -> tuple[float, float, float]:
    """Geometric mean over rounds of one policy's figure over another's, and its 95 % interval."""
    of = {(row["round"], row["policy"]): row[name] for row in rows}
    logs = [
        math.log(value / of[number, below])
        for (number, policy), value in of.items()
        if policy == above and (number, below) in of
    ]
    if not logs:
        return (math.nan, math.nan, math.nan)
    center, count = mean(logs), len(logs)
    half = math.inf
    if count > 1:
        half = _T[min(count - 2, len(_T) - 1)] * stdev(logs) / math.sqrt(count)
    half = min(half, 9.0)  # of a single round nothing is known
    return (math.exp(center), math.exp(center - half), math.exp(center + half))


def _table(points: dict[str, Any], overall: dict[str, float]) -> str:
    policies = list(next(iter(points.values()))["policies"])
    head = "| temperature:streams | " + " | ".join(policies) + " | look-ahead / best [95 %] | new prompts |"
    lines = [head, "|---" * (len(policies) + 3) + "|"]
    for point, each in points.items():
        cells = [f"{each['policies'][policy]['over_off'][0]:.3f}" for policy in policies]
        ratio, low, high = each["ours_over_best"]
        best = f"{ratio:.3f} [{low:.3f}, {high:.3f}] ({each['best_of_half']})"
        new = each["new_prompts"]
        fresh = f"{new['over_off'][0]:.3f}, TTFT {new['ttft_over_off'][0]:.3f}"
        lines.append(f"| {point} | " + " | ".join(cells) + f" | {best} | {fresh} |")
    cells = [f"{overall[policy]:.3f}" if policy in overall else "" for policy in policies]
    lines.append("| geometric mean | " + " | ".join(cells) + " | | |")
    return "\n".join(lines)


def _plot(points: dict[str, Any], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(15, 4.5))
    heats = list(dict.fromkeys(point.partition(":")[0] for point in points))
    for axis, heat in zip(axes, heats, strict=False):
        mine = [point for point in points if point.startswith(f"{heat}:")]
        streams = [int(point.partition(":")[2]) for point in mine]
        for policy in points[mine[0]]["policies"]:
            ratios = [points[point]["policies"][policy]["over_off"] for point in mine]
            style = {"linewidth": 2.5, "color": "black"} if policy == OURS else {"linewidth": 1.0}
            axis.plot(
                streams, [ratio[0] for ratio in ratios], marker="o", markersize=3, label=policy, **style
            )
        axis.set_title(f"temperature {heat}")
        axis.set_ylabel("tokens a second over off")
        axis.legend(fontsize=7)
    for heat, line in zip(heats, ("-", "--"), strict=False):
        mine = [point for point in points if point.startswith(f"{heat}:")]
        streams = [int(point.partition(":")[2]) for point in mine]
        for name, label in (("verify_length", "verified"), ("slots", "drafted by the model")):
            values = [points[point]["policies"][OURS][name] for point in mine]
            axes[2].plot(
                streams, values, line, marker="o", markersize=3, label=f"{label}, temperature {heat}"
            )
    axes[2].set_title("look-ahead, tokens a sequence and step")
    axes[2].legend(fontsize=7)
    for axis in axes:
        axis.set_xscale("log", base=2)
        axis.set_xlabel("streams")
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)
