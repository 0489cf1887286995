"""Policies that weigh expected tokens against time: look-ahead, the paper's two, and a plain threshold.

All of them admit in rank order, and none looks at a token before it is admitted (paper section 3.2.2,
appendix A): what a decision may look at decides whether the output keeps its law.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.lookahead import best_count, filled, look_ahead
from scheduler.policy import Choice
from scheduler.ranking import Floats, Ranking, gains, rank


class _Adaptive:
    """Drafts as much as pays."""

    def slots(self) -> None:
        return None


class LookAhead(_Adaptive):
    """Within a few percent of knowing everything, and exact; see `scheduler.lookahead`."""

    name = "lookahead"

    def select(self, choice: Choice) -> list[int]:
        ranking, guarded = _ranked(choice)
        seconds, start, count = choice.seconds, float(choice.sequences), len(choice.blocks)
        free = ranking.only(~guarded)  # known completely
        if not guarded.any():
            return ranking.lengths(best_count(free.survival[: choice.row_cap], start, seconds), count)
        # As many as were drafted, whatever became of them: their number must not tell.
        size = min(sum(block.length for block in choice.blocks), choice.row_cap)
        lagged = [block.lagged[: block.length] for block in choice.blocks if block.guarded]
        ahead = filled(np.sort(np.concatenate([free.survival, *map(np.asarray, lagged)]))[::-1], size)
        admitted = look_ahead(filled(ranking.survival, size), ahead, start, seconds)
        lengths = ranking.lengths(admitted, count)
        if guarded.all():
            return lengths
        fixed = sum(length for length, held in zip(lengths, guarded, strict=True) if held)
        start += float(ranking.survival[:admitted][guarded[ranking.block[:admitted]]].sum())
        room = free.survival[: choice.row_cap - fixed]
        again = free.lengths(best_count(room, start, seconds[fixed:]), count)
        return [length if held else new for length, held, new in zip(lengths, guarded, again, strict=True)]


class Algorithm1(_Adaptive):
    """The paper's: admit while each candidate strictly improves the rate; the first that does not ends it."""

    name = "algorithm1"

    def select(self, choice: Choice) -> list[int]:
        ranking, _ = _ranked(choice)
        current = _capped(ranking, choice)
        rate = gains(float(choice.sequences), current) / choice.seconds[: len(current) + 1]
        worse = np.flatnonzero(rate[1:] <= rate[:-1])
        return ranking.lengths(int(worse[0]) if len(worse) else len(current), len(choice.blocks))


class Lagged(_Adaptive):
    """The paper's production scheme: how many by the rounds before, which by current survivals."""

    name = "lagged"

    def select(self, choice: Choice) -> list[int]:
        ranking, _ = _ranked(choice)
        values = [np.asarray(block.lagged[: block.length]) for block in choice.blocks]
        before = np.sort(np.concatenate([np.zeros(0), *values]))[::-1][: choice.row_cap]
        count = best_count(before, float(choice.sequences), choice.seconds)
        return ranking.lengths(min(count, len(ranking)), len(choice.blocks))


@dataclass
class Threshold(_Adaptive):
    """Each block up to its first chance below base + sensitivity * load, within [least, most] tokens."""

    base: float = 0.5
    sensitivity: float = 0.3
    least: int = 0
    most: int = 64
    name = "threshold"

    def select(self, choice: Choice) -> list[int]:
        bar, left, lengths = self.base + self.sensitivity * choice.load, choice.row_cap, []
        for block in choice.blocks:
            wanted = next((k for k, c in enumerate(block.chances) if not c >= bar), len(block.chances))
            length = min(max(wanted, self.least), self.most, block.length, left)
            lengths.append(length)
            left -= length
        return lengths


def _ranked(choice: Choice) -> tuple[Ranking, npt.NDArray[np.bool_]]:
    """Candidates in rank order, and which blocks are guarded."""
    ranking = rank([block.chances for block in choice.blocks])
    return ranking, np.array([block.guarded for block in choice.blocks], dtype=bool)


def _capped(ranking: Ranking, choice: Choice) -> Floats:
    return ranking.survival[: choice.row_cap]
