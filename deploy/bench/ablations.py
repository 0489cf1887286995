"""What each part of a draft model is worth: `dspark train` with one thing changed at a time.

    .venv/bin/python -m deploy.bench.ablations --data DIR --features DIR --runs DIR [--only NAME ...]

Each run has the same texts, steps and seed, and one thread; `--processes` of them go on at once. A run that
was cut off goes on where it was, a finished one is not repeated, and rows of runs elsewhere are kept.
Accepted lengths are those of the trainer's last validation: held-out texts, teacher-forced, averaged weights.
Writes results/ablations.json and .png.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from drafters.evaluation.plots import can_plot, overlaps
from drafters.training.recipe import Recipe

_RESULTS = Path(__file__).parents[2] / "results"
_COMMON = {"rank": 128, "texts": 2, "anchors": 16, "learning_rate": 3e-3, "target_start": False}
_BASE = "DSpark: vanilla head of rank 128, 2 layers, block of 7, 16k tokens"

#: by name, what is another than in the base
VARIANTS: dict[str, dict[str, Any]] = {
    _BASE: {},
    "1 layer": {"num_layers": 1},
    "no head (DFlash), 2 layers": {"head": "none"},
    "no head (DFlash), 3 layers": {"head": "none", "num_layers": 3},
    "no head (DFlash), 4 layers": {"head": "none", "num_layers": 4},
    "gated head": {"head": "gated"},
    "RNN head": {"head": "rnn"},
    "rank 32": {"rank": 32},
    "rank 256": {"rank": 256},
    "9 heads of K/V instead of 3": {"kv_heads": 9},
    "block of 15": {"block_size": 15},
    "8k tokens": {"draft_vocab": 8192},
    "32k tokens": {"draft_vocab": 32768},
    "half the learning rate": {"learning_rate": 1.5e-3},
    "blocks of 1 to 7, as many more as they are shorter": {"least_slots": 1, "fill": True},
    "blocks of 3 to 7, as many more as they are shorter": {"least_slots": 3, "fill": True},
    "8 texts with 4 blocks each": {"texts": 8, "anchors": 4},
    "begins as the target's last layers": {"target_start": True},
}


def main() -> int:
    options = _parser().parse_args()
    wanted = options.only or list(VARIANTS)
    with ThreadPoolExecutor(options.processes) as pool:
        failed = [name for name, fine in pool.map(lambda name: _train(name, options), wanted) if not fine]
    rows = _known(options) | {
        name: row for name in VARIANTS if (row := _last(_folder(name, options), options.steps))
    }
    content = {"steps": options.steps, "texts": options.most_texts, "common": _COMMON, "rows": rows}
    (_RESULTS / "ablations.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(_markdown(rows))
    if can_plot():
        overlaps(
            {name: (row["tau"], row["overlap"]) for name, row in rows.items()}, _RESULTS / "ablations.png"
        )
    for name in failed:
        print(f"ablations: {name}: failed, see {_folder(name, options)}.log", file=sys.stderr)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, metavar="DIR", help="with smollm2-answers/")
    parser.add_argument("--features", required=True, metavar="DIR", help="of `dspark data features`")
    parser.add_argument("--runs", required=True, type=Path, metavar="DIR", help="where each run has a folder")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--most-texts", type=int, default=2000)
    parser.add_argument("--processes", type=int, default=2)
    return parser


def _folder(name: str, options: argparse.Namespace) -> Path:
    runs: Path = options.runs
    return runs / "".join(letter if letter.isalnum() else "-" for letter in name.lower())


def _train(name: str, options: argparse.Namespace) -> tuple[str, bool]:
    folder = _folder(name, options)
    recipe = Recipe(**{**_COMMON, "steps": options.steps, "most_texts": options.most_texts, **VARIANTS[name]})
    options.runs.mkdir(parents=True, exist_ok=True)
    file = folder.with_suffix(".json")
    recipe.save(file)
    command = [sys.executable, "-m", "server.cli", "train", "--recipe", str(file), "--threads", "1"]
    command += ["--output-dir", str(folder), "--data", options.data, "--features", options.features]
    print(f"{name}: training", flush=True)
    with folder.with_suffix(".log").open("a", encoding="utf-8") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode == 0
    print(f"{name}: {'done' if done else 'FAILED'}", flush=True)
    return name, done


def _known(options: argparse.Namespace) -> dict[str, Any]:
    """What was measured by the same number of steps and texts, wherever those runs are now."""
    file = _RESULTS / "ablations.json"
    if not file.exists():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    same = (content["steps"], content["texts"]) == (options.steps, options.most_texts)
    rows: dict[str, Any] = content["rows"] if same else {}
    return rows


def _last(folder: Path, steps: int) -> dict[str, Any] | None:
    """Of a finished run: tau, c* by position, training time."""
    try:
        with (folder / "metrics.csv").open(encoding="utf-8") as file:
            row = list(csv.DictReader(file))[-1]
    except (OSError, IndexError):
        return None
    if int(row["step"]) < steps:
        return None
    return {
        "tau": float(row["tau_held_out"]),
        "tau_greedy": float(row["tau_greedy_held_out"]),
        "overlap": [float(value) for key, value in row.items() if key.startswith("overlap_")],
        "seconds": float(row["seconds"]),
    }


def _markdown(rows: dict[str, dict[str, Any]]) -> str:
    lines = ["| | tau T=1 | tau T=0 | c* by position |", "|---|---|---|---|"]
    for name, row in rows.items():
        chances = " ".join(f"{value:.2f}" for value in row["overlap"][:7])
        lines.append(f"| {name} | {row['tau']:.3f} | {row['tau_greedy']:.3f} | {chances} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
