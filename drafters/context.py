"""Context K/V of verified rows, written in larger pieces than steps bring them.

A step adds a row or two a sequence, and most of what writing them costs is not arithmetic: weights are read,
and the kernels begin and end. So features are kept until there are many rows or steps, until a sequence is
drafted for, or until sequences come or go: from then on others may find their pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from drafters.blocks import DraftBlocks
from engine.batch import Tokens, Verdict, VerificationBatch
from engine.native.draft import Span

#: cutting and joining rows takes arrays a fraction of the time that it takes tensors
Features = torch.Tensor | npt.NDArray[np.float32]

#: of a sequence in a step: (its key, position of its first row, rows, how many of them are final, pages)
_Share = tuple[int, int, int, int, Tokens]

#: of steps that are only noted, of all sequences together; less than a page of each may wait beside them
_MOST_ROWS = 128


@dataclass(slots=True)
class _Rows:
    """Features of rows that follow one another, from position `start` on."""

    start: int
    end: int
    pages: Tokens
    pieces: list[tuple[Features, int, int]] = field(default_factory=list)  # rows of a step's features

    def let_go(self) -> None:
        """Keep no step with many rows alive for the few that are ours."""
        for i, (known, first, last) in enumerate(self.pieces):
            if len(known) > _MOST_ROWS:
                own = known[first:last]
                self.pieces[i] = own.clone() if isinstance(own, torch.Tensor) else own.copy(), 0, last - first


class Context:
    """Every full page holds its K/V when a step is over in which sequences came, went, or began anew.

    While the same ones go on, nobody else can see their pages, and rows wait; those behind the last full page
    always may.
    """

    def __init__(self, blocks: DraftBlocks, page_size: int) -> None:
        self.blocks, self.page_size = blocks, page_size
        self._steps: list[tuple[torch.Tensor, list[_Share]]] = []
        self._rows = 0  # of these steps
        self._next: list[tuple[int, int]] = []  # (key, position) of a step by the same sequences
        self._waiting: dict[int, _Rows] = {}
        self._space = np.empty((0, 0), dtype=np.float32)

    def observe(self, batch: VerificationBatch, features: torch.Tensor, verdicts: Sequence[Verdict]) -> None:
        """Take the features [T, m * d] of every row that is final: known tokens and accepted drafts.

        What waits for sequences that are not in the batch is dropped behind their last full page: nearly all
        have ended or will start anew.
        """
        # Steps are only noted here: between two forward passes the caches are cold, and whatever is done for
        # each costs several times what it does when it is done for all.
        shares: list[_Share] = []
        begins, ends = [], []
        for item, verdict in zip(batch.items, verdicts, strict=True):
            final = item.count - item.verify + verdict.accepted
            shares.append((item.sequence, item.start, item.count, final, item.pages))
            begins.append((item.sequence, item.start))
            ends.append((item.sequence, item.start + final))
        if begins != self._next:  # before these rows: they may lie in pages that belonged to others
            self._settle()
        self._steps.append((features, shares))
        self._rows += len(features)
        self._next = ends
        if self._rows >= _MOST_ROWS or len(self._steps) >= self.page_size:
            self._settle()

    def _settle(self) -> None:
        """Tell whose rows they are in the steps since the last time, and write what fills pages."""
        for features, shares in self._steps:
            known = features.numpy() if _as_array(features) else features
            waiting: dict[int, _Rows] = {}
            row = 0
            for sequence, start, count, final, pages in shares:
                rows = self._waiting.get(sequence)
                if rows is None or rows.end != start:
                    rows = _Rows(start, start, pages)
                rows.pieces.append((known, row, row + final))
                rows.end, rows.pages = start + final, pages
                row += count
                waiting[sequence] = rows
            self._waiting = waiting
        due = [key for key, rows in self._waiting.items() if self._fills_a_page(rows)]
        self._steps.clear()
        self._rows = 0
        self._write([self._waiting.pop(key) for key in due])
        for rows in self._waiting.values():
            rows.let_go()

    def _fills_a_page(self, rows: _Rows) -> bool:
        return rows.end // self.page_size > rows.start // self.page_size

    def complete(self, sequences: Iterable[int]) -> None:
        """Write what waits for these."""
        self._settle()
        self._write([self._waiting.pop(each) for each in sequences if each in self._waiting])

    def _write(self, due: Sequence[_Rows]) -> None:
        if due:
            pieces = [known[first:last] for rows in due for known, first, last in rows.pieces]
            spans = [Span(rows.start, rows.end - rows.start, rows.pages) for rows in due]
            self.blocks.write_context(spans, self._joined(pieces))

    def _joined(self, pieces: list[Features]) -> torch.Tensor:
        if isinstance(pieces[0], torch.Tensor):
            return torch.cat([piece for piece in pieces if isinstance(piece, torch.Tensor)])
        count, width = sum(map(len, pieces)), pieces[0].shape[1]
        if self._space.shape[0] < count or self._space.shape[1] != width:  # new memory costs more than rows
            self._space = np.empty((2 * count, width), dtype=np.float32)
        return torch.from_numpy(np.concatenate(pieces, out=self._space[:count]))


def _as_array(features: torch.Tensor) -> bool:
    return features.device.type == "cpu" and features.dtype == torch.float32
