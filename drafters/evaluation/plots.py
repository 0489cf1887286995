"""Pictures of what training and evaluation measured. Without matplotlib (extra `plot`) there are none."""

from __future__ import annotations

import csv
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scheduler.calibration import Calibration, sigmoid
from scheduler.throughput import Throughput


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def training_curve(metrics: Path, picture: Path) -> None:
    """Accepted length and loss over the steps, from metrics.csv; a row a save."""
    with metrics.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    figure, (left, right) = _axes(2, "training")
    steps = [int(row["step"]) for row in rows]
    for name, label in (
        ("tau_train", "train, T=1"),
        ("tau_held_out", "held out, T=1"),
        ("tau_greedy_held_out", "held out, T=0"),
    ):
        left.plot(steps, [_number(row.get(name)) for row in rows], label=label)
    for name, label in (("loss", "train"), ("loss_held_out", "held out")):
        right.plot(steps, [_number(row.get(name)) for row in rows], label=label)
    _finish(left, "step", "accepted length (bonus included)")
    _finish(right, "step", "loss")
    _save(figure, picture)


def cost_curves(model: Throughput, picture: Path) -> None:
    """Seconds of verifying and drafting, and the rows a second that they allow."""
    figure, (left, right) = _axes(2, "what a step costs")
    for curve, label in ((model.verify, "verify"), (model.draft, "draft")):
        if any(curve.seconds):
            left.plot(
                curve.sizes,
                [1e3 * seconds for seconds in curve.seconds],
                marker="o",
                markersize=3,
                label=label,
            )
    rates = [size / seconds for size, seconds in zip(model.verify.sizes, model.verify.seconds, strict=True)]
    right.plot(model.verify.sizes, rates, marker="o", markersize=3)
    for axis in (left, right):
        axis.set_xscale("log", base=2)
    _finish(left, "rows verified, tokens drafted", "ms")
    _finish(right, "rows verified", "rows a second")
    _save(figure, picture)


def evaluation(drafters: Mapping[str, Sequence[Mapping[str, Any]]], picture: Path) -> None:
    """Of rows as `dspark eval` writes them, by drafter: acceptance by position, tau, trust in confidence."""
    heats = sorted({row["temperature"] for rows in drafters.values() for row in rows}, reverse=True)
    figure, axes = _axes(3, "evaluation")
    for name, rows in drafters.items():
        for heat in heats:
            mean = _mean_row(rows, heat)
            if mean is None:
                continue
            style: dict[str, Any] = {"label": f"{name}, T={heat:g}", "linestyle": "-" if heat else "--"}
            chances = mean["conditional"]
            axes[0].plot(range(1, len(chances) + 1), chances, marker="o", markersize=3, **style)
            for position, each in enumerate(mean.get("reliability") or (), 1):
                if heat and position in (1, 2, 4):
                    bins = each["bins"]
                    label = f"{name}, first {position}"
                    axes[2].plot([b[0] for b in bins], [b[1] for b in bins], marker=".", label=label)
    heat = heats[0]
    names = [row["benchmark"] for row in next(iter(drafters.values())) if row["temperature"] == heat]
    width = 0.8 / len(drafters)
    for index, (name, rows) in enumerate(drafters.items()):
        taus = {row["benchmark"]: row["tau"] for row in rows if row["temperature"] == heat}
        places = [place + index * width for place in range(len(names))]
        axes[1].bar(places, [taus.get(each, 0.0) for each in names], width, label=name)
    axes[1].set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
    axes[2].plot([0, 1], [0, 1], color="grey", linewidth=0.7)
    _finish(axes[0], "position in the block", "acceptance if all before were accepted")
    _finish(axes[1], "", f"accepted length at T={heat:g}")
    _finish(axes[2], "predicted survival", "share that survived")
    _save(figure, picture)


def overlaps(drafters: Mapping[str, tuple[float, Sequence[float]]], picture: Path) -> None:
    """(tau at T = 1, c* by position) of each drafter."""
    figure, (left, right) = _axes(2, "overlaps")
    for index, (name, (_, chances)) in enumerate(drafters.items()):
        style: dict[str, Any] = {"color": f"C{index % 10}", "linestyle": "-" if index < 10 else "--"}
        left.plot(range(1, len(chances) + 1), chances, marker="o", markersize=3, label=name, **style)
    names = list(drafters)[::-1]  # the first one on top
    right.barh(names, [drafters[name][0] - 1.0 for name in names], left=1.0)
    right.tick_params(axis="y", labelsize=7)
    _finish(left, "position in the block", "overlap with the target, c*")
    _finish(right, "accepted length at T=1 (bonus included)", "")
    _save(figure, picture)


def reliability_diagram(
    regimes: Mapping[str, tuple[Calibration, npt.NDArray[Any], npt.NDArray[Any]]], picture: Path
) -> None:
    """Predicted against true survival of held-out rounds by regime, before and after calibration.

    regimes: (table, logits [N, gamma], accepted [N]) of each.
    """
    figure, axes = _axes(max(2, len(regimes)), "reliability")
    for plot, (name, (table, logits, accepted)) in zip(axes, regimes.items(), strict=False):
        for survival, style in ((sigmoid(logits), "--"), (table.apply(logits), "-")):
            survival = survival.cumprod(axis=1)
            for k in (0, 1, 3):
                if k < survival.shape[1]:
                    label = f"first {k + 1}, {'before' if style == '--' else 'after'}"
                    plot.plot(*_diagram(survival[:, k], accepted > k), style, marker=".", label=label)
        plot.plot([0, 1], [0, 1], color="grey", linewidth=0.7)
        plot.set_title(name)
        _finish(plot, "predicted survival", "share that survived")
    _save(figure, picture)


def _diagram(predicted: npt.NDArray[Any], survived: npt.NDArray[Any]) -> tuple[list[float], list[float]]:
    """Mean prediction and share that survived, in ten bins of [0, 1]."""
    place = np.minimum((predicted * 10).astype(int), 9)
    filled = [b for b in range(10) if (place == b).sum() >= 20]
    return [float(predicted[place == b].mean()) for b in filled], [
        float(survived[place == b].mean()) for b in filled
    ]


def _mean_row(rows: Sequence[Mapping[str, Any]], heat: float) -> Mapping[str, Any] | None:
    pooled = [r for r in rows if r["benchmark"] == "macro average" and r["temperature"] == heat]
    return pooled[0] if pooled else None


def _number(text: str | None) -> float:
    return float(text) if text else float("nan")


def _axes(count: int, title: str) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=(5.5 * count, 4.2), num=title, clear=True)
    return figure, axes


def _finish(axes: Any, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7)


def _save(figure: Any, picture: Path) -> None:
    figure.tight_layout()
    partial = picture.with_name(f".{picture.name}")
    figure.savefig(partial, dpi=110, format=picture.suffix.removeprefix("."))
    partial.replace(picture)
