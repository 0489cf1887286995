"""CUDA graphs: a step of so many rows recorded once, and replayed by one launch.

A replay does what was recorded, on the memory that was recorded. So a graph is made for a number of rows,
steps are padded up to the next such number, and everything that goes in or out lies at a fixed address.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

Replay = Callable[[], None]
Progress = Callable[[str], None]
Key = TypeVar("Key")

#: up to so many rows, a size every so many
_STEPS = ((8, 8), (64, 8), (128, 16), (512, 32), (1024, 64))
LARGEST = _STEPS[-1][0]


def bucket_sizes(most: int) -> tuple[int, ...]:
    """Sizes that graphs are made for where there are never more than `most` rows; `most` is one if it can be.

    Close to one another where a row more costs a large part of a step.
    """
    sizes, size = [1, 2, 4], 0
    for limit, step in _STEPS:
        while size < limit:
            size += step
            sizes.append(size)
    most = min(most, LARGEST)
    return (*(size for size in sizes if size < most), most)


def bucket_for(rows: int, sizes: Sequence[int]) -> int | None:
    """The smallest size that holds so many rows; None: there is none."""
    place = bisect.bisect_left(sizes, rows)
    return sizes[place] if place < len(sizes) else None


class GraphBackend(Protocol):
    """Records work for replay."""

    def capture(self, run: Callable[[], None]) -> Replay:
        """Do `run` as a rehearsal, then record it. It must not wait for the device, nor depend on values."""


class CudaGraphs:
    """Graphs of one kind, in one pool of memory: only one of them is under way at any time."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._device = torch.device(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._aside = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def capture(self, run: Callable[[], None]) -> Replay:
        main = torch.cuda.current_stream(self._device)
        self._aside.wait_stream(main)
        with torch.cuda.stream(self._aside):  # kernels are compiled and libraries set up outside of the graph
            run()
        main.wait_stream(self._aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        return graph.replay


def capture_all(
    backend: GraphBackend,
    keys: Sequence[Key],
    prepare: Callable[[Key], Callable[[], None]],
    progress: Progress,
    what: str,
) -> dict[Key, Replay]:
    """A graph for each key, in order: the largest first, whose memory the others then share.

    `prepare` makes everything ready, plans included, and returns what is to be recorded.
    """
    graphs: dict[Key, Replay] = {}
    for number, key in enumerate(keys, 1):
        graphs[key] = backend.capture(prepare(key))
        if number == len(keys) or number % 8 == 0:
            progress(f"recorded {number} of {len(keys)} graphs for {what}")
    return graphs
