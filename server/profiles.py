"""Profiles of step costs: measured once for a model, drafter and machine, and kept in the cache folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.profile import Profiler
from engine.worker import Worker
from scheduler.throughput import Throughput


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
    """The profile that belongs to `identity`, whatever costs depend on; measured if `fresh` or unknown."""
    executor = worker.executor
    known = {
        **identity,
        "gamma": gamma,
        "block": block,
        "rows": most_rows,
        "sequences": most_sequences,
        "form": 6,
    }
    text = json.dumps(known, sort_keys=True, default=str)
    file = cache / "profiles" / f"{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}.json"
    try:
        if fresh:
            raise ValueError("a fresh one is wanted")
        model = Throughput.from_dict(json.loads(file.read_text(encoding="utf-8"))["throughput"])
        model.check(most_rows)
        return model
    except (OSError, ValueError, KeyError, TypeError):
        pass  # none yet, or of another form
    progress("measuring what steps cost")
    buckets: tuple[int, ...] = getattr(executor, "row_buckets", ())
    profiler = Profiler(worker, vocab, executor.num_pages, executor.page_size, gamma, block, buckets=buckets)
    model = profiler.run(most_rows, most_sequences, progress)
    try:
        _keep(file, json.dumps({"of": known, "throughput": model.to_dict()}, indent=1, default=str))
    except OSError as error:  # full or read-only
        reason = error.strerror or str(error)
        progress(f"the profile cannot be kept in {file.parent}, every start will measure: {reason}")
    return model


def _keep(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
