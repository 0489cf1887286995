"""How well conditional chances foretell acceptance in service, and a slow correction where they do not.

Whether a draft was tried at all never depends on the draft itself, so conditional acceptance is unbiased for
this even where a policy trims blocks; what is old counts less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_BINS = 15
_MEMORY = 20_000  # drafts after which one counts a third
_RATE = 0.001  # of a draft in the correction, in logits
_FEW = 200.0  # drafts below which nothing is said
_HEAVY = 1e6


class RunningCalibration:
    """Of one regime; `shift` [positions] are to be added to logits where they are corrected."""

    def __init__(self, positions: int) -> None:
        self.shift = [0.0] * positions
        # By predicted chance. Plain numbers: a step decides on a few drafts, block by block.
        self._miss, self._count = [0.0] * _BINS, [0.0] * _BINS
        self._weight = 1.0  # of a draft now; what is older counts less than what weighs more

    def observe(self, chances: Sequence[float], decided: int, accepted: int) -> None:
        """So many drafts of a block with these chances were decided on, and its first ones accepted."""
        if not decided:
            return
        self._weight *= math.exp(decided / _MEMORY)
        for place, chance in enumerate(chances[:decided]):
            miss = (place < accepted) - chance
            self.shift[place] += _RATE * miss
            which = min(int(chance * _BINS), _BINS - 1)
            self._miss[which] -= self._weight * miss
            self._count[which] += self._weight
        if self._weight > _HEAVY:
            self._miss = [each / self._weight for each in self._miss]
            self._count = [each / self._weight for each in self._count]
            self._weight = 1.0

    @property
    def error(self) -> float | None:
        """Expected calibration error of conditional chances; None while too little is known."""
        total = sum(self._count)
        return sum(map(abs, self._miss)) / total if total >= _FEW * self._weight else None
