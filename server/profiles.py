"""Profiles of step costs: measured once for a model, drafter and machine, and kept in the cache folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.other_load import OtherLoad
from engine.profile import Profiler
from engine.worker import Worker
from scheduler.throughput import Throughput

_BUSY = 0.1  # of the processors: when others had more, what was measured is not what steps cost


def throughput(
    worker: Worker,
    identity: dict[str, Any],
    gamma: int,
    block: int,
    vocab: int,
    most_rows: int,
    most_sequences: int,
    cache: Path,
    progress: Callable[[str], None],
    fresh: bool = False,
) -> Throughput:
    """The profile that belongs to `identity`, whatever costs depend on; measured if `fresh` or unknown.

    Says so, at every start, if other programs kept the processors busy while it was measured.
    """
    executor = worker.executor
    known = {
        **identity,
        "gamma": gamma,
        "block": block,
        "rows": most_rows,
        "sequences": most_sequences,
        "form": 8,
    }
    text = json.dumps(known, sort_keys=True, default=str)
    file = cache / "profiles" / f"{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.json"
    try:
        if fresh:
            raise ValueError("a fresh one is wanted")
        content = json.loads(file.read_text(encoding="utf-8"))
        model = Throughput.from_dict(content["throughput"])
        model.check(most_rows)
        _tell(float(content["others"]), progress)
        return model
    except (OSError, ValueError, KeyError, TypeError):
        pass  # none yet, or of another form
    progress("measuring what steps cost")
    buckets: tuple[int, ...] = getattr(executor, "row_buckets", ())
    profiler = Profiler(worker, vocab, executor.num_pages, executor.page_size, gamma, block, buckets=buckets)
    load = OtherLoad()
    model = profiler.run(most_rows, most_sequences, progress)
    others = load.share()
    _tell(others, progress)
    try:
        content = {"of": known, "others": round(others, 3), "throughput": model.to_dict()}
        _keep(file, json.dumps(content, indent=1, default=str))
    except OSError as error:  # full or read-only
        reason = error.strerror or str(error)
        progress(f"the profile cannot be kept in {file.parent}, every start will measure: {reason}")
    return model


def _tell(others: float, progress: Callable[[str], None]) -> None:
    if others > _BUSY:
        progress(
            f"other programs kept {others:.0%} of the processors busy while the profile was measured: "
            "`dspark profile --fresh` on a calm machine makes a better one"
        )


def _keep(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
