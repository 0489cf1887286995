"""Where the rows of a batch read and write, as arrays: FlashInfer's form of a page table, and padding.

Pure: numbers in, arrays out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Ints32 = npt.NDArray[np.int32]
Ints64 = npt.NDArray[np.int64]


class Placed(Protocol):
    """`count` rows of one sequence from position `start` on, and the sequence's pages."""

    @property
    def start(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def pages(self) -> Ints32: ...


@dataclass(frozen=True, slots=True)
class PagedRows:
    """S request slots and B rows, padding included.

    A request's rows are qo_indptr [S + 1], its pages kv_indices[kv_indptr [S + 1]], its length, these rows
    included, kv_lens [S], and what of it lies on its last page last_page_len [S]: all int32. A slot without
    a request has neither rows nor pages. slots [B] are the pool rows that the rows' K and V go to, positions
    [B] where the rows stand in their sequences: int64. Padding rows write to the scratch page.
    """

    qo_indptr: Ints32
    kv_indptr: Ints32
    kv_indices: Ints32
    last_page_len: Ints32
    kv_lens: Ints32
    slots: Ints64
    positions: Ints64

    @property
    def longest(self) -> int:
        """The most rows that a request has."""
        return int(np.diff(self.qo_indptr).max(initial=0))


def paged_rows(
    spans: Sequence[Placed], page_size: int, scratch: int, rows: int | None = None, slots: int | None = None
) -> PagedRows:
    """The spans' rows one after another, padded to `rows` and `slots` (default: not at all).

    `scratch` is a page that belongs to nobody.
    """
    counts = np.array([span.count for span in spans], dtype=np.int64)
    starts = np.array([span.start for span in spans], dtype=np.int64)
    lengths = starts + counts
    used = -(-lengths // page_size)
    kv_indptr = _indptr(used)
    kv_indices = _joined([span.pages[:held] for span, held in zip(spans, used.tolist(), strict=True)])
    first_rows = np.cumsum(counts) - counts
    total = int(counts.sum())
    own = np.repeat(np.arange(len(counts)), counts)
    positions = np.arange(total) - first_rows[own] + starts[own]
    pages = kv_indices[kv_indptr[own] + positions // page_size].astype(np.int64)
    last = lengths - (used - 1) * page_size
    more_rows = 0 if rows is None else rows - total
    more_slots = 0 if slots is None else slots - len(counts)
    if more_rows < 0 or more_slots < 0:
        raise ValueError(f"{total} rows of {len(counts)} requests do not fit into {rows} and {slots}")
    return PagedRows(
        qo_indptr=np.pad(_indptr(counts), (0, more_slots), mode="edge"),
        kv_indptr=np.pad(kv_indptr, (0, more_slots), mode="edge"),
        kv_indices=kv_indices,
        last_page_len=np.pad(last, (0, more_slots)).astype(np.int32),
        kv_lens=np.pad(lengths, (0, more_slots)).astype(np.int32),
        slots=np.pad(
            pages * page_size + positions % page_size,
            (0, more_rows),
            constant_values=scratch * page_size,
        ),
        positions=np.pad(positions, (0, more_rows)),
    )


def padded(values: npt.NDArray[Any] | Sequence[int], size: int) -> Ints64:
    """[size] int64, zeros behind the values."""
    out = np.zeros(size, dtype=np.int64)
    out[: len(values)] = values
    return out


def _indptr(counts: Ints64) -> Ints32:
    out = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=out[1:])
    return out


def _joined(parts: Sequence[Ints32]) -> Ints32:
    return np.concatenate(parts).astype(np.int32) if parts else np.zeros(0, dtype=np.int32)
