"""Context K/V of verified rows, written in larger pieces than steps bring them.

A step adds a row or two a sequence, and most of what writing them costs is not arithmetic. So their features
are kept until the sequence is drafted for, or until they fill a page: from then on others may find it.
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


@dataclass(slots=True)
class _Rows:
    """Features of rows that follow one another, from position `start` on."""

    start: int
    end: int
    pages: Tokens
    pieces: list[tuple[Features, int, int]] = field(default_factory=list)  # rows of a step's features


class Context:
    """Every full page holds its K/V whenever a step is over; rows behind the last full page may wait."""

    def __init__(self, blocks: DraftBlocks, page_size: int) -> None:
        self.blocks, self.page_size = blocks, page_size
        self._steps: list[tuple[torch.Tensor, list[_Share]]] = []
        self._waiting: dict[int, _Rows] = {}

    def observe(self, batch: VerificationBatch, features: torch.Tensor, verdicts: Sequence[Verdict]) -> None:
        """Take the features [T, m * d] of every row that is final: known tokens and accepted drafts.

        What waits for sequences that are not in the batch is dropped: they have ended, or will start anew.
        """
        # Most steps fill no page, and are only noted: between two forward passes the caches are cold, and
        # whatever is done for each costs several times what it does when it is done for all.
        shares, size = [], self.page_size
        full = len(self._steps) + 1 >= size
        for item, verdict in zip(batch.items, verdicts, strict=True):
            final = item.count - item.verify + verdict.accepted
            shares.append((item.sequence, item.start, item.count, final, item.pages))
            full = full or (item.start + final) // size > item.start // size
        self._steps.append((features, shares))
        if full:
            self._settle()

    def _settle(self) -> None:
        """Tell whose rows they are in the steps since the last time, and write what fills pages."""
        due: list[_Rows] = []
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
                if rows.end // self.page_size > rows.start // self.page_size:
                    due.append(rows)
                else:
                    waiting[sequence] = rows
            self._waiting = waiting
        self._steps.clear()
        self._write(due)

    def complete(self, sequences: Iterable[int]) -> None:
        """Write what waits for these."""
        self._settle()
        self._write([self._waiting.pop(each) for each in sequences if each in self._waiting])

    def _write(self, due: Sequence[_Rows]) -> None:
        if due:
            pieces = [known[first:last] for rows in due for known, first, last in rows.pieces]
            spans = [Span(rows.start, rows.end - rows.start, rows.pages) for rows in due]
            self.blocks.write_context(spans, _joined(pieces))


def _as_array(features: torch.Tensor) -> bool:
    return features.device.type == "cpu" and features.dtype == torch.float32


def _joined(pieces: list[Features]) -> torch.Tensor:
    if isinstance(pieces[0], torch.Tensor):
        return torch.cat([piece for piece in pieces if isinstance(piece, torch.Tensor)])
    return torch.from_numpy(np.concatenate(pieces))
