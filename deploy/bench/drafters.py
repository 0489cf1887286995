"""All drafters on the nine benchmarks: `dspark eval` for each, kept as one table, a row at a time.

    .venv/bin/python -m deploy.bench.drafters --data DIR --drafters DSpark=RUN/draft "prompt lookup=ngram" ...

A drafter is NAME=FOLDER, NAME=ngram, or NAME=hybrid:FOLDER. What results/drafters.json holds already is not
measured again; delete its entry for that. Draws results/drafters.png too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from drafters.config import DraftConfig
from drafters.evaluation.plots import can_plot, evaluation

_RESULTS = Path(__file__).parents[2] / "results"


def main() -> int:
    options = _parser().parse_args()
    file = _RESULTS / "drafters.json"
    table: dict[str, Any] = (
        json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"drafters": {}}
    )
    _RESULTS.mkdir(exist_ok=True)
    for entry in options.drafters:
        name, _, where = entry.partition("=")
        if name in table["drafters"]:
            continue
        print(f"== {name}", flush=True)
        table["drafters"][name] = _measure(where, options) | {
            "limit": options.limit,
            "max_tokens": options.max_tokens,
            "tokens": options.tokens,
            "recipe": _recipe(where),
        }
        file.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    print(_markdown(table))
    if can_plot():
        evaluation(
            {name: each["rows"] for name, each in table["drafters"].items()}, _RESULTS / "drafters.png"
        )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, metavar="DIR", help="with eval_*.jsonl")
    parser.add_argument("--drafters", nargs="+", required=True, metavar="NAME=WHAT")
    parser.add_argument("--limit", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=7, help="drafted a round")
    return parser


def _speculation(where: str, tokens: int) -> dict[str, Any]:
    if where == "ngram":
        return {"method": "ngram", "num_speculative_tokens": tokens}
    method, _, folder = where.rpartition(":")
    config = DraftConfig.from_folder(folder)
    if not method:
        method = config.family
    if method == "block":
        method = "dspark" if config.head != "none" else "dflash"
    return {"method": method, "model": folder, "num_speculative_tokens": min(tokens, config.gamma)}


def _measure(where: str, options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "eval.json"
        command = [
            *(sys.executable, "-c", "import sys; from server.cli import main; sys.exit(main())", "eval"),
            *("--data", options.data, "--json", str(result)),
            *("--limit", str(options.limit), "--max-tokens", str(options.max_tokens)),
            *("--speculative-config", json.dumps(_speculation(where, options.tokens))),
        ]
        subprocess.run(command, check=True)
        rows = json.loads(result.read_text(encoding="utf-8"))["rows"]
    return {"rows": rows}


def _recipe(where: str) -> dict[str, Any] | None:
    """What the run says that trained it; None for what was not trained."""
    if where == "ngram":
        return None
    run = Path(where.rpartition(":")[2])
    file = next((f for f in (run / "recipe.json", run.parent / "recipe.json") if f.exists()), None)
    return None if file is None else json.loads(file.read_text(encoding="utf-8"))


def _markdown(table: dict[str, Any]) -> str:
    """Accepted length at T=1 / T=0 by drafter and benchmark."""
    drafters = table["drafters"]
    names = [row["benchmark"] for row in next(iter(drafters.values()))["rows"] if row["temperature"] == 1.0]
    lines = ["| drafter | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for name, each in drafters.items():
        tau = {(row["benchmark"], row["temperature"]): row["tau"] for row in each["rows"]}
        cells = [f"{tau[b, 1.0]:.2f} / {tau[b, 0.0]:.2f}" for b in names]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
