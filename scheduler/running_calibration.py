"""How well conditional chances foretell acceptance in service, and a slow correction where they do not.

Whether a draft was tried at all never depends on the draft itself, so conditional acceptance is unbiased for
this even where a policy trims blocks; what is old counts less.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler.ranking import Floats

_BINS = 15
_MEMORY = 20_000  # drafts after which one counts a third
_RATE = 0.001  # of a draft in the correction, in logits
_FEW = 200.0  # drafts below which nothing is said


class RunningCalibration:
    """Of one regime; `shift` [positions] are to be added to logits where they are corrected."""

    def __init__(self, positions: int) -> None:
        self.shift = np.zeros(positions)
        self._miss, self._count = np.zeros(_BINS), np.zeros(_BINS)

    def observe(self, chances: Floats, tried: npt.NDArray[np.bool_], accepted: npt.NDArray[np.bool_]) -> None:
        """All [n, L]: what was predicted, whether it came to a decision, and which."""
        count = np.count_nonzero(tried)
        if not count:
            return
        predicted = chances[tried]
        place = np.minimum((predicted * _BINS).astype(np.int64), _BINS - 1)
        fade = np.exp(-count / _MEMORY)
        self._miss = self._miss * fade + np.bincount(place, predicted - accepted[tried], _BINS)
        self._count = self._count * fade + np.bincount(place, minlength=_BINS)
        off = np.where(tried, accepted - chances, 0.0).sum(axis=0)
        self.shift[: len(off)] += _RATE * off

    @property
    def error(self) -> float | None:
        """Expected calibration error of conditional chances; None while too little is known."""
        total = float(self._count.sum())
        return float(np.abs(self._miss).sum()) / total if total >= _FEW else None
