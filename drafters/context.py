"""Context K/V of verified rows, written in larger pieces than steps bring them.

A step adds a row or two a sequence, and most of what writing them costs is not arithmetic. So their features
are kept until the sequence is drafted for, or until they fill a page: from then on others may find it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from drafters.blocks import DraftBlocks
from engine.batch import Tokens, Verdict, VerificationBatch
from engine.native.draft import Span


@dataclass(slots=True)
class _Rows:
    """Features of rows that follow one another, from position `start` on."""

    start: int
    end: int
    pages: Tokens
    pieces: list[torch.Tensor] = field(default_factory=list)


class Context:
    """Every full page holds its K/V whenever a step is over; rows behind the last full page may wait."""

    def __init__(self, blocks: DraftBlocks, page_size: int) -> None:
        self.blocks, self.page_size = blocks, page_size
        self._waiting: dict[int, _Rows] = {}

    def observe(self, batch: VerificationBatch, features: torch.Tensor, verdicts: Sequence[Verdict]) -> None:
        """Take the features [T, m * d] of every row that is final: known tokens and accepted drafts.

        What waits for sequences that are not in the batch is dropped: they have ended, or will start anew.
        """
        waiting: dict[int, _Rows] = {}
        due: list[_Rows] = []
        # One call: a slice a sequence would cost more than everything else here.
        pieces = features.split_with_sizes([item.count for item in batch.items])
        for item, verdict, piece in zip(batch.items, verdicts, pieces, strict=True):
            final = item.count - item.verify + verdict.accepted
            rows = self._waiting.get(item.sequence)
            if rows is None or rows.end != item.start:
                rows = _Rows(item.start, item.start, item.pages)
            rows.pieces.append(piece if final == item.count else piece[:final])
            rows.end, rows.pages = rows.end + final, item.pages
            if rows.end // self.page_size > rows.start // self.page_size:
                due.append(rows)
            else:
                waiting[item.sequence] = rows
        self._waiting = waiting
        self._write(due)

    def complete(self, sequences: Iterable[int]) -> None:
        """Write what waits for these."""
        self._write([self._waiting.pop(each) for each in sequences if each in self._waiting])

    def _write(self, due: Sequence[_Rows]) -> None:
        if due:
            spans = [Span(rows.start, rows.end - rows.start, rows.pages) for rows in due]
            self.blocks.write_context(spans, torch.cat([piece for rows in due for piece in rows.pieces]))
