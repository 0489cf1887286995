"""`make gpu-check`: what needs a GPU to be known, in at most ten minutes and without network.

    python -m deploy.gpu.check pack PIECES --data DIR      where the model is: what has to travel, in pieces
    python -m deploy.gpu.check run PIECES... --out OUT     on the GPU
    python -m deploy.gpu.check run --dry-run --work W --out OUT    the script itself, at toy size on a CPU

The most valuable first: (1) attention, (2) stress, (3) divergence, (4) costs, (5) speed, (6) training. Each
is a process of its own, so that one that crashes or hangs takes no other with it, and its result is in OUT
(check.json, check.txt) before the next begins. The trained draft model comes back in pieces: join them with

    python -m deploy.gpu.check join OUT DRAFT
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.gpu import kit, train


@dataclass(frozen=True)
class Step:
    """`least` and `most` seconds that it may have; one with less left is passed over."""

    name: str
    module: str
    least: float
    most: float


STEPS = (
    Step("attention", "deploy.gpu.check_attention", 15, 60),
    Step("stress", "deploy.gpu.check_stress", 20, 60),
    Step("divergence", "deploy.gpu.check_divergence", 25, 75),
    Step("costs", "deploy.gpu.check_costs", 25, 75),
    Step("speed", "deploy.gpu.check_speed", 60, 160),
    Step("training", "deploy.gpu.check_training", 60, 600),
)
_GRACE = 15.0  # seconds beyond its time after which a step is ended


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code: of `run`, 1 if a step failed or was wrong."""
    options = _parser().parse_args(argv)
    try:
        return int(options.do(options))
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    pack = commands.add_parser("pack")
    pack.set_defaults(do=_pack)
    pack.add_argument("pieces", type=Path)
    pack.add_argument(
        "--data", type=Path, required=True, help="folder with train_mix_24k.jsonl and smollm2-answers/"
    )
    pack.add_argument("--python", default="3.12", help="version of Python on the GPU machine, for wheels")
    names = [step.name for step in STEPS]
    run = commands.add_parser("run")
    run.set_defaults(do=_run)
    run.add_argument("pieces", type=Path, nargs="*")
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--work", type=Path, default=Path("build/gpu-check"))
    run.add_argument("--minutes", type=float, default=9.5, help="all in all")
    run.add_argument("--only", nargs="+", choices=names, default=names)
    run.add_argument(
        "--dry-run", action="store_true", help="toy sizes on a CPU; --work holds model/ and draft/"
    )
    step = commands.add_parser("step")  # what `run` starts
    step.set_defaults(do=_step)
    step.add_argument("name", choices=names)
    step.add_argument("told", help="JSON of its options")
    back = commands.add_parser("join")
    back.set_defaults(do=lambda options: kit.unbundle(options.out, options.draft))
    back.add_argument("out", type=Path)
    back.add_argument("draft", type=Path)
    return parser


def _pack(options: argparse.Namespace) -> int:
    status = train.main(["pack", str(options.pieces), "--data", str(options.data)])
    if status == 0:
        kit.pack_tokenizer(options.pieces)
        kit.pack_packages(options.pieces / "packages", options.python)
        kit.sizes(options.pieces)
    return status


def _run(options: argparse.Namespace) -> int:
    end = time.monotonic() + 60 * options.minutes
    options.out.mkdir(parents=True, exist_ok=True)
    options.work.mkdir(parents=True, exist_ok=True)
    site = kit.unpack(options.pieces, options.work) if options.pieces else None
    report: dict[str, Any] = {"machine": machine(), "dry_run": options.dry_run, "steps": {}}
    texts: list[str] = []
    for step in STEPS:
        if step.name not in options.only:
            continue
        left = end - time.monotonic()
        if left < step.least and not options.dry_run:
            entry: dict[str, Any] = {"status": "passed over", "why": f"{left:.0f} s were left"}
        else:
            entry = _start(step, min(step.most, left), options, site)
        report["steps"][step.name] = entry
        (options.out / "check.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        texts.append(f"== {step.name}: {entry['status']}\n{entry.pop('table', entry.get('why', ''))}\n")
        (options.out / "check.txt").write_text("\n".join(texts), encoding="utf-8")
        print(texts[-1], flush=True)
    return int(any(entry["status"] in ("failed", "wrong") for entry in report["steps"].values()))


def _start(step: Step, seconds: float, options: argparse.Namespace, site: Path | None) -> dict[str, Any]:
    """Run a step in a process of its own."""
    result = options.work / f"{step.name}.json"
    result.unlink(missing_ok=True)
    told = {
        "work": str(options.work),
        "pieces": [str(piece) for piece in options.pieces],
        "seconds": seconds,
        "dry": options.dry_run,
        "result": str(result),
    }
    begun = time.monotonic()
    command = [sys.executable, "-m", "deploy.gpu.check", "step", step.name, json.dumps(told)]
    with contextlib.suppress(subprocess.TimeoutExpired):
        limit = None if options.dry_run else seconds + _GRACE
        subprocess.run(command, env=kit.environment(site), timeout=limit, check=False)
    entry: dict[str, Any] = {"status": "failed", "why": "it ended without a result, or had to be ended"}
    if result.exists():
        entry = json.loads(result.read_text(encoding="utf-8"))
    kit.bundle(options.work / "bundle", options.out)
    return {**entry, "seconds": round(time.monotonic() - begun, 1)}


def _step(options: argparse.Namespace) -> int:
    """In the step's own process: its result, or why there is none, as JSON."""
    from deploy.gpu.check_step import StepOptions

    told = json.loads(options.told)
    module = importlib.import_module(next(step.module for step in STEPS if step.name == options.name))
    pieces = tuple(Path(piece) for piece in told["pieces"])
    try:
        found = module.run(StepOptions(Path(told["work"]), pieces, told["seconds"], told["dry"]))
        status = "ok" if found["passed"] else "wrong"
        entry = {"status": status, "result": found, "table": module.table(found)}
    except Exception as error:
        traceback.print_exc()
        entry = {"status": "failed", "why": f"{type(error).__name__}: {error}"}
    Path(told["result"]).write_text(json.dumps(entry, default=str), encoding="utf-8")
    return int(entry["status"] != "ok")


def machine() -> dict[str, Any]:
    """What it ran on."""
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    commit = ""
    with contextlib.suppress(OSError):  # no git there
        asked = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "gpu": gpu,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": commit or None,
    }


if __name__ == "__main__":
    sys.exit(main())
