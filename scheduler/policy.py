"""How far each drafted block is verified, and how many tokens are drafted at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from scheduler.ranking import Floats, table

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Drafted:
    """One block that waits for verification, as a policy may see it.

    `length` tokens were drafted. `chances` [length] estimate that each is accepted if those before it are
    (empty: nothing is known). `lagged`: survivals of the same request's round before, or what new requests
    are expected to do. `guarded`: the request is rejection-sampled, so its admissions must not look at what
    its drafts turned out to be.
    """

    length: int
    chances: tuple[float, ...] = ()
    lagged: tuple[float, ...] = ()
    guarded: bool = True


@dataclass(frozen=True, slots=True)
class Choice:
    """What a policy decides upon: the blocks of R requests, of up to L tokens, as `Drafted` has them.

    length [R], chances [R, L] and lagged [R, L] (0 past a block's end), guarded [R]. `sequences` yield a
    token each with no draft verified; at most `row_cap` drafts may be. `seconds` [row_cap + 1]: what the step
    takes with 0, 1, ... of them, everything else in it included; empty where there is no throughput model.
    `load` is known before anything was drafted.
    """

    length: Ints
    chances: Floats
    lagged: Floats
    guarded: npt.NDArray[np.bool_]
    sequences: int
    row_cap: int
    seconds: Floats = field(default_factory=lambda: np.zeros(0))
    load: float = 0.0

    @classmethod
    def of(
        cls,
        blocks: Sequence[Drafted],
        sequences: int,
        row_cap: int,
        seconds: Floats | None = None,
        load: float = 0.0,
    ) -> Choice:
        """From blocks one by one."""
        return cls(
            np.array([block.length for block in blocks], dtype=np.int64),
            table([block.chances[: block.length] for block in blocks]),
            table([block.lagged[: block.length] for block in blocks]),
            np.array([block.guarded for block in blocks], dtype=bool),
            sequences,
            row_cap,
            np.zeros(0) if seconds is None else seconds,
            load,
        )


@dataclass(frozen=True, slots=True)
class FewChoice:
    """The same in plain numbers, for at most `scheduler.few.FEW` candidates; `alive` are the survivals."""

    length: list[int]
    chances: list[list[float]]
    alive: list[list[float]]
    lagged: list[list[float]]
    guarded: list[bool]
    sequences: int
    row_cap: int
    seconds: list[float]
    load: float = 0.0

    def arrays(self) -> Choice:
        return Choice(
            np.array(self.length, dtype=np.int64),
            table(self.chances),
            table(self.lagged),
            np.array(self.guarded, dtype=bool),
            self.sequences,
            self.row_cap,
            np.array(self.seconds),
            self.load,
        )


class VerifyPolicy(Protocol):
    """Chooses verification lengths from numbers alone."""

    name: str

    def slots(self) -> int | None:
        """How many tokens to draft for a sequence (0: do not draft); None: as many as pay."""

    def select(self, choice: Choice) -> list[int]:
        """How many drafts of each block to verify, in order; at most `row_cap` in all."""

    def select_few(self, choice: FewChoice) -> list[int]:
        """The same decision."""
        return self.select(choice.arrays())


class Fixed(VerifyPolicy):
    """Verify the first k drafts of every block, whatever the load.

    When the row cap binds, positions are filled one after another across the blocks, in order, which looks
    at nothing that was drafted and so cannot bias anything.
    """

    def __init__(self, k: int) -> None:
        if k < 0:
            raise ValueError(f"fixed:K needs K >= 0, got {k}")
        self.k = k
        self.name = f"fixed:{k}" if k else "off"

    def slots(self) -> int:
        return self.k

    def select(self, choice: Choice) -> list[int]:
        wanted, left = np.minimum(choice.length, self.k), choice.row_cap
        if wanted.sum() <= left:
            return _list(wanted)
        lengths = np.zeros_like(wanted)
        for position in range(self.k):
            takers = np.flatnonzero(wanted > position)[:left]
            lengths[takers] += 1
            left -= len(takers)
        return _list(lengths)


def _list(lengths: Ints) -> list[int]:
    out: list[int] = lengths.tolist()
    return out
