"""Candidates for verification in rank order, and what admitting them is worth.

A candidate is one drafted position of one block. Rank: survival descending, position ascending, block
ascending. Survival never rises along a block, so the first k candidates are always prefixes of blocks; and
a tie within a block is broken towards the earlier position, or the order could depend on a token that it
decides about (paper section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Ranking:
    """Candidates with a positive survival in rank order: block [N], survival [N]."""

    block: npt.NDArray[np.int64]
    survival: Floats

    def __len__(self) -> int:
        return len(self.block)

    def lengths(self, count: int, blocks: int) -> list[int]:
        """Verify lengths of all blocks when the first `count` candidates are admitted."""
        chosen: list[int] = np.bincount(self.block[:count], minlength=blocks).tolist()
        return chosen

    def only(self, blocks: npt.NDArray[np.bool_]) -> Ranking:
        """Those candidates that belong to the blocks marked in [blocks]."""
        kept = blocks[self.block]
        return Ranking(self.block[kept], self.survival[kept])


def table(rows: Sequence[Sequence[float]]) -> Floats:
    """[rows, longest]: zeros where a row is shorter."""
    lengths = {len(row) for row in rows}
    if len(lengths) == 1:  # the common case, in one go
        return np.array(rows, dtype=np.float64).reshape(len(rows), *lengths)
    out = np.zeros((len(rows), max(lengths, default=0)))
    for line, row in zip(out, rows, strict=True):
        line[: len(row)] = row
    return out


def survivals(chances: Floats) -> Floats:
    """[R, L] of conditional acceptance chances [R, L], which need not be sane.

    The survival of a position is the product of the chances up to it, each between 0 and 1, and 0 from the
    first that is no number.
    """
    sane: Floats = np.fmin(np.fmax(chances, 0.0), 1.0)  # fmax takes the number where the other is none
    return sane.cumprod(axis=1)


def rank(alive: Floats) -> Ranking:
    """All candidates of blocks with these survivals [R, L]; 0 past a block's end."""
    flat = alive.T.ravel()  # position by position, so that a stable sort breaks ties as the rank order says
    order = np.argsort(-flat, kind="stable")[: np.count_nonzero(flat > 0.0)]
    return Ranking(order % max(1, len(alive)), flat[order])


def gains(start: float, survival: Floats) -> Floats:
    """[n + 1]: expected tokens when 0, 1, ..., n candidates are admitted; `start` with none."""
    out = np.empty(len(survival) + 1)
    out[0] = start
    np.cumsum(survival, out=out[1:])
    out[1:] += start
    return out
