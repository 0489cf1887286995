"""Everything that the API can do at once, beside plain chat: tokens a second of both, in turns.

.venv/bin/python -m deploy.bench.mixed [--users 16] [--rounds 3] [--run-time 25]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

from loadtest.configurations import Configuration, running, serve_command

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run-time", type=float, default=25.0)
    options = parser.parse_args()
    rates: dict[str, list[float]] = {"plain": [], "mixed": []}
    command = serve_command(Configuration("mixed"), ())
    with tempfile.TemporaryDirectory() as folder, running(command, Path(folder) / "serve.log") as url:
        for turn in range(options.rounds + 1):  # the first warms prompts and grammars
            for kind, seen in rates.items():
                run = _run(url, kind, options, turn, Path(folder))
                if run["errors"]:
                    raise SystemExit(f"{kind}: {run['errors']}")
                if turn:
                    seen.append(run["throughput"]["output_tokens_per_second"])
                    print(f"{kind}: {_told(run)}", flush=True)
    ratio = mean(rates["mixed"]) / mean(rates["plain"])
    print(f"mixed over plain, {options.users} users: {ratio:.2f}")
    return 0


def _told(run: dict[str, Any]) -> str:
    through, done = run["throughput"], [row for row in run["records"]["rows"] if row[2] == "ok"]
    fast = through["output_tokens_per_second"], through["tokens_per_second_per_user"]
    length = run["tokens"]["completed"] / max(1, len(done))
    return f"{fast[0]:.0f} tokens/s, {fast[1]:.1f} a user while decoding, {length:.0f} tokens an answer"


def _run(url: str, kind: str, options: argparse.Namespace, seed: int, folder: Path) -> dict[str, Any]:
    file = folder / "run.json"
    command = [sys.executable, "-m", "loadtest", "run", url, "--scenario", str(HERE / f"users_{kind}.py")]
    command += ["--users", str(options.users), "--run-time", str(options.run_time), "--warmup", "5"]
    subprocess.run(
        [*command, "--seed", str(seed), "--quiet", "--json", str(file)], check=True, stdout=subprocess.DEVNULL
    )
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result


if __name__ == "__main__":
    raise SystemExit(main())
