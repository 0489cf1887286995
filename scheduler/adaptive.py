"""Policies that weigh expected tokens against time: look-ahead, the paper's two, and a plain threshold.

All of them admit in rank order, and none looks at a token before it is admitted (paper section 3.2.2,
appendix A): what a decision may look at decides whether the output keeps its law.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from scheduler import few
from scheduler.lookahead import best_count, filled, look_ahead
from scheduler.policy import Choice, FewChoice, VerifyPolicy
from scheduler.ranking import Ranking, gains, rank, survivals


class _Adaptive(VerifyPolicy):
    """Drafts as much as pays."""

    def slots(self) -> None:
        return None


class LookAhead(_Adaptive):
    """Within a few percent of knowing everything, and exact; see `scheduler.lookahead`."""

    name = "lookahead"

    def select_few(self, choice: FewChoice) -> list[int]:
        return few.select(choice)

    def select(self, choice: Choice) -> list[int]:
        ranking, guarded, seconds = _ranked(choice), choice.guarded, choice.seconds
        start, count = float(choice.sequences), len(choice.length)
        if not guarded.any():
            return ranking.lengths(best_count(ranking.survival[: choice.row_cap], start, seconds), count)
        free = ranking.only(~guarded)  # known completely
        # As many as were drafted, whatever became of them: their number must not tell.
        size = min(int(choice.length.sum()), choice.row_cap)
        ahead = np.sort(np.concatenate([free.survival, choice.lagged[guarded].ravel()]))[::-1]
        admitted = look_ahead(filled(ranking.survival, size), filled(ahead, size), start, seconds)
        lengths = ranking.lengths(admitted, count)
        if guarded.all():
            return lengths
        fixed = sum(length for length, kept in zip(lengths, guarded, strict=True) if kept)
        held = ranking.survival[:admitted][guarded[ranking.block[:admitted]]]
        start += float(gains(0.0, held)[-1])
        room = free.survival[: choice.row_cap - fixed]
        again = free.lengths(best_count(room, start, seconds[fixed:]), count)
        return [length if kept else new for length, kept, new in zip(lengths, guarded, again, strict=True)]


class Algorithm1(_Adaptive):
    """The paper's: admit while each candidate strictly improves the rate; the first that does not ends it."""

    name = "algorithm1"

    def select(self, choice: Choice) -> list[int]:
        ranking = _ranked(choice)
        current = ranking.survival[: choice.row_cap]
        rate = gains(float(choice.sequences), current) / choice.seconds[: len(current) + 1]
        worse = np.flatnonzero(rate[1:] <= rate[:-1])
        return ranking.lengths(int(worse[0]) if len(worse) else len(current), len(choice.length))


class Lagged(_Adaptive):
    """The paper's production scheme: how many by the rounds before, which by current survivals."""

    name = "lagged"

    def select(self, choice: Choice) -> list[int]:
        ranking = _ranked(choice)
        before = np.sort(choice.lagged, axis=None)[::-1][: min(choice.row_cap, int(choice.length.sum()))]
        count = best_count(before, float(choice.sequences), choice.seconds)
        return ranking.lengths(min(count, len(ranking)), len(choice.length))


@dataclass
class Threshold(_Adaptive):
    """Each block up to its first chance below base + sensitivity * load, within [least, most] tokens."""

    base: float = 0.5
    sensitivity: float = 0.3
    least: int = 0
    most: int = 64
    name: str = "threshold"

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            raise ValueError(f"threshold needs 0 <= min <= max, got {self.least} and {self.most}")

    def select(self, choice: Choice) -> list[int]:
        bar = self.base + self.sensitivity * choice.load
        wanted = (choice.chances >= bar).cumprod(axis=1).sum(axis=1)
        wanted = np.minimum(np.clip(wanted, self.least, self.most), choice.length)
        used = np.cumsum(wanted) - wanted  # by the blocks before
        out: list[int] = np.clip(choice.row_cap - used, 0, wanted).tolist()
        return out


def _ranked(choice: Choice) -> Ranking:
    return rank(survivals(choice.chances))
