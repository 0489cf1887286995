"""Step times of the native executor, beside the time that reading the weights once takes in the same run.

    .venv/bin/python deploy/bench/step_times.py [--quantization bf16 gguf] [--json FILE]

Two tables: B rows of one sequence (what a verification costs), and R sequences with one or several rows
each (what a batch costs). The floor is the time of a plain read of as many bytes by as many threads; steps
and reads take turns, the best of each counts, and their ratio stands in brackets.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.batch import BatchItem, DraftBlock, VerificationBatch
from engine.models.config import ModelConfig
from engine.models.locate import cache_folder, locate_model
from engine.native.weights import Rows, load_weights
from engine.native_executor import PAGE_SIZE, NativeExecutor
from engine.params import SamplingParams
from engine.sampling import SamplingState

STATE = SamplingState(SamplingParams(), 0, frozenset())


def main() -> int:
    options = _parser().parse_args()
    folder = locate_model(options.model, cache_folder(), print)
    config = ModelConfig.from_folder(folder)
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {}
    for kind in options.quantization:
        weights = load_weights(folder, kind)
        size = sum(
            value.data.nbytes if isinstance(value, Rows) else value.nbytes for value in weights.values()
        )
        pages = sum(-(-(context + 40) // PAGE_SIZE) for context in options.contexts) * max(options.sequences)
        executor = NativeExecutor(config, weights, pages, options.threads, max(options.contexts) + 512)
        bench = _Bench(executor, size, options.repeats)
        print(f"{kind}: {size / 1e6:.0f} MB of weights, {executor.model.kernels}, {options.threads} threads")
        results[kind] = {"bytes": size, "rows": bench.rows(options), "requests": bench.requests(options)}
        results[kind]["floor_ms"] = bench.floor * 1e3
        print(f"floor {bench.floor * 1e3:.1f} ms, {size / bench.floor / 1e9:.1f} GB/s\n")
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


def _parser() -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--quantization", nargs="+", default=["bf16", "gguf"])
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256])
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--each", type=int, nargs="+", default=[1, 4], help="rows of each sequence")
    parser.add_argument("--contexts", type=int, nargs="+", default=[200, 1000, 4000])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", metavar="FILE")
    return parser


class _Bench:
    def __init__(self, executor: NativeExecutor, size: int, repeats: int) -> None:
        self.executor = executor
        self.repeats = repeats
        self.floor = float("inf")
        self._memory = torch.ones(size // 4)

    def _best(self, work: Callable[[], Any]) -> tuple[float, float]:
        """Best times of the work and of reading the weights, taken in turns."""
        best = floor = float("inf")
        for _ in range(self.repeats):
            floor = min(floor, _seconds(self._memory.sum), _seconds(self._memory.sum))
            work()  # until torch's own threads, which wait for more work for a while, are asleep again
            best = min(best, _seconds(work), _seconds(work))
        self.floor = min(self.floor, floor)
        return best, floor

    def _table(self, cells: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        for name, (seconds, floor) in cells.items():
            print(f"  {name:<36} {seconds * 1e3:8.1f} ms  ({seconds / floor:.2f})")
        return {name: (seconds * 1e3, floor * 1e3) for name, (seconds, floor) in cells.items()}

    def rows(self, options: argparse.Namespace) -> dict[str, tuple[float, float]]:
        """B rows of one sequence behind a short context."""
        context, cells = min(options.contexts), {}
        history = np.arange(1, context + 2, dtype=np.int32)
        pages = np.arange(-(-(context + 300) // PAGE_SIZE), dtype=np.int32)
        self._prefill(history, pages)
        for rows in options.rows:
            batch = VerificationBatch((_item(history, rows, pages),))
            cells[f"{rows} rows, context {context}"] = self._best(lambda b=batch: self.executor.forward(b))
        return self._table(cells)

    def requests(self, options: argparse.Namespace) -> dict[str, tuple[float, float]]:
        """R sequences, each behind a context of its own."""
        cells = {}
        for context in options.contexts:
            history = np.arange(1, context + 2, dtype=np.int32)
            need = -(-(context + 40) // PAGE_SIZE)
            all_pages = [
                np.arange(i * need, (i + 1) * need, dtype=np.int32) for i in range(max(options.sequences))
            ]
            for pages in all_pages:
                self._prefill(history, pages)
            for each in options.each:
                for count in options.sequences:
                    batch = VerificationBatch(
                        tuple(_item(history, each, pages) for pages in all_pages[:count])
                    )
                    name = f"{count} x {each} rows, context {context}"
                    cells[name] = self._best(lambda b=batch: self.executor.forward(b))
        return self._table(cells)

    def _prefill(self, history: np.ndarray, pages: np.ndarray) -> None:
        for start in range(0, len(history) - 1, 128):
            count = min(128, len(history) - 1 - start)
            item = BatchItem(0, history, start, count, pages, False, STATE, 1, 0)
            self.executor.forward(VerificationBatch((item,)))


def _seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _item(history: np.ndarray, rows: int, pages: np.ndarray) -> BatchItem:
    """A sequence that verifies rows - 1 drafts; every row's logits are wanted."""
    draft = DraftBlock(tuple(range(1, rows))) if rows > 1 else None
    start = len(history) - 1
    return BatchItem(0, history, start, rows, pages, True, STATE, rows, 0, draft, rows - 1)


if __name__ == "__main__":
    sys.exit(main())
