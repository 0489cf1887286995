"""What a pass over many blocks reads, as arrays: places of context and slots, and how tokens are drawn."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from drafters.config import DraftConfig
from drafters.device_head import BlockDraws
from drafters.slots import SlotDraw
from engine.cuda.kv_pool import KVPool
from engine.cuda.paging import Ints64, padded, paged_rows
from engine.cuda.staging import Array
from engine.native.draft import Span


class BlockArrays:
    """Of a pass over `size` lines, of which the first are the spans' blocks.

    A line has room for a whole block; slots that a block does not use, and lines without one, write to the
    scratch page and are seen by nobody. With `recorded` all shapes follow from `size` alone.
    """

    def __init__(
        self, config: DraftConfig, pool: KVPool, spans: Sequence[Span], size: int, recorded: bool
    ) -> None:
        self.pool, self.spans, self.size, self.recorded = pool, spans, size, recorded
        self.gamma, self.width, self.window = config.gamma, config.gamma + config.unread, config.window
        own = [Span(span.start, span.count + config.unread, span.pages) for span in spans]
        lines = size * self.width if recorded else None
        #: as a plan of paged attention has the used slots
        self.rows = paged_rows(own, pool.page_size, pool.scratch, lines, lines)
        self.counts = np.ones(size, dtype=np.int64)  # a line without a block sees itself, which is a number
        self.counts[: len(own)] = [span.count for span in own]

    def fields(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and types of `arrays`."""
        size, slots = self.size, self.size * self.width
        shapes: dict[str, tuple[int, ...]] = {"anchors": (size,), "starts": (size,), "counts": (size,)}
        if self.window is None:
            read = slots if self.recorded else int(self.rows.qo_indptr[-1])
            shapes |= {"slots": (slots,), "order": (read,), "places": (slots,)}
        else:
            shapes |= {"pages": (size, self._window_pages), "first_page": (size,)}
        fields = {name: (shape, torch.int64) for name, shape in shapes.items()}
        return fields | BlockDraws.fields(size, self.gamma)

    def arrays(self, anchors: Sequence[int], draws: Sequence[list[SlotDraw]]) -> dict[str, Array]:
        """What goes to the device; anchors are the tokens, one a block."""
        starts = padded([span.start for span in self.spans], self.size)
        out: dict[str, Array] = {
            "anchors": padded(anchors, self.size),
            "starts": starts,
            "counts": self.counts,
        }
        out |= self._paged() if self.window is None else self._windowed(self.window, starts)
        return out | BlockDraws.arrays(draws, self.size, self.gamma)

    @property
    def _window_pages(self) -> int:
        """That a window can touch."""
        return ((self.window or 1) - 1) // self.pool.page_size + 2

    def _windowed(self, window: int, starts: Ints64) -> dict[str, Array]:
        """See `drafters.device_attention.WindowAttend`."""
        size = self.pool.page_size
        first = np.maximum(starts - window, 0) // size
        pages = np.full((self.size, self._window_pages), self.pool.scratch, dtype=np.int64)
        for line, span in enumerate(self.spans):
            own = span.pages[first[line] : -(-span.start // size)]
            pages[line, : len(own)] = own
        return {"pages": pages, "first_page": first}

    def _paged(self) -> dict[str, Array]:
        """See `drafters.device_attention.PageAttend`."""
        used = np.flatnonzero(np.arange(self.width) < self.counts[: len(self.spans), None])
        others = np.setdiff1d(np.arange(self.size * self.width), used)
        order = np.concatenate((used, others)) if self.recorded else used
        places = np.zeros(self.size * self.width, dtype=np.int64)
        places[order] = np.arange(len(order))
        slots = np.full(self.size * self.width, self.pool.scratch * self.pool.page_size, dtype=np.int64)
        slots[used] = self.rows.slots[: len(used)]
        return {"slots": slots, "order": order, "places": places}
