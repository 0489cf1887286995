"""Step 6 of `make gpu-check`: the default model's drafter, trained on this GPU (see deploy/gpu/train.py)."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from deploy.gpu import train
from deploy.gpu.check_step import StepOptions, shown, table_of


def run(options: StepOptions) -> dict[str, Any]:
    """Trains for the time there is; what comes of it lies in work/bundle, which travels back."""
    if not options.pieces:
        raise ValueError("there are no pieces with a model and prompts to train on")
    out = options.work / "bundle"
    arguments = ["run", *map(str, options.pieces), "--out", str(out), "--work", str(options.work / "train")]
    # Some seconds for starting and for the last save.
    minutes = 0.2 if options.dry else max(0.5, (options.seconds - 20.0) / 60.0)
    arguments += ["--minutes", str(minutes)]
    if options.dry:
        recipe = (options.work / "recipe.json").read_text(encoding="utf-8")
        arguments += ["--device", "cpu", "--max-tokens", "16", "--save-every", "4", "--recipe", recipe]
    if train.main(arguments):
        raise RuntimeError("training failed; see what it printed")
    return {**last_line(out / "metrics.csv"), "passed": (out / "draft.0").exists()}


def last_line(file: Path) -> dict[str, Any]:
    """The newest figures of a training run, and how many there were."""
    with file.open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    return {"evaluations": len(rows), **{name: _number(value) for name, value in rows[-1].items()}}


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def table(result: dict[str, Any]) -> str:
    names = [name for name in result if name != "passed"]
    return table_of(names, [[shown(result[name]) for name in names]])
