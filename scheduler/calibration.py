"""Confidence that means what it says: sequential temperature scaling (paper section 3.2.1).

Position by position from the left, one temperature each, chosen so that the product of scaled chances up to
there predicts how often that many drafts are accepted. Only rounds that verified every draft may be used:
trimmed ones hide what would have happened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from scheduler.ranking import Floats

Regime = Literal["greedy", "rejection", "coupled"]

#: where tables lie, beside the draft model
CALIBRATION_FILE = "calibration.json"

_GRID = np.geomspace(0.1, 10.0, 41)
_BINS = 15


@dataclass(frozen=True, slots=True)
class Calibration:
    """Temperatures by position for one drafter and one way of sampling, and how far they can be trusted."""

    regime: Regime
    temperatures: tuple[float, ...]
    samples: int = 0
    ece_before: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()

    def chances(self, logits: Sequence[float]) -> tuple[float, ...]:
        """Conditional acceptance chances from raw confidence logits, as far as there are temperatures."""
        scaled = np.asarray(logits[: len(self.temperatures)]) / self.temperatures[: len(logits)]
        out: list[float] = sigmoid(scaled).tolist()
        return tuple(out)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Calibration:
        """Raises ValueError for a table that cannot be one."""
        known = {**raw, **{k: tuple(raw[k]) for k in ("temperatures", "ece_before", "ece_after") if k in raw}}
        try:
            table = cls(**known)
        except TypeError as error:
            raise ValueError(f"no calibration: {error}") from None
        if not all(temperature > 0.0 for temperature in table.temperatures):
            raise ValueError("calibration temperatures must be positive")
        return table


def sigmoid(x: Floats) -> Floats:
    out: Floats = 0.5 * (1.0 + np.tanh(0.5 * np.asarray(x, dtype=np.float64)))
    return out


def fit(
    regime: Regime,
    logits: Floats,
    accepted: npt.NDArray[np.int64],
    held_out: tuple[Floats, npt.NDArray[np.int64]] | None = None,
) -> Calibration:
    """logits [N, gamma] of blocks verified in full, accepted [N] drafts of each.

    The errors are those on `held_out` rounds (None: the same that were fitted to).
    """
    rounds, gamma = logits.shape
    survival, temperatures = np.ones(rounds), []
    for k in range(gamma):
        survived = accepted > k
        best, least = 1.0, np.inf
        for temperature in _GRID:
            error = expected_calibration_error(survival * sigmoid(logits[:, k] / temperature), survived)
            if error < least:  # of equals the first
                best, least = float(temperature), error
        survival = survival * sigmoid(logits[:, k] / best)
        temperatures.append(best)
    judged = held_out or (logits, accepted)
    before, after = errors([1.0] * gamma, *judged), errors(temperatures, *judged)
    return Calibration(regime, tuple(temperatures), rounds, before, after)


def errors(
    temperatures: Sequence[float], logits: Floats, accepted: npt.NDArray[np.int64]
) -> tuple[float, ...]:
    """Expected calibration error of survival at each position with these temperatures."""
    survival, out = np.ones(len(logits)), []
    for k, temperature in enumerate(temperatures):
        survival = survival * sigmoid(logits[:, k] / temperature)
        out.append(expected_calibration_error(survival, accepted > k))
    return tuple(out)


def expected_calibration_error(
    predicted: Floats, survived: npt.NDArray[np.bool_], bins: int = _BINS
) -> float:
    """Mean distance of predicted and true survival over equal bins of [0, 1], weighted by what falls in."""
    place = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    miss = np.bincount(place, weights=predicted - survived, minlength=bins)
    return float(np.abs(miss).sum() / max(1, len(predicted)))


class Acceptance:
    """Conditional acceptance by position, from what was verified: for drafters without a confidence head.

    A draft behind the first rejection was never tried. What is old counts less, and an unseen position leans
    on the one before it.
    """

    def __init__(self, positions: int, decay: float = 0.995, prior: float = 0.5) -> None:
        self._decay, self._prior = decay, prior
        self._tried, self._accepted = np.zeros(positions), np.zeros(positions)

    def observe(self, verified: int, accepted: int) -> None:
        """A round verified so many drafts and accepted so many."""
        if not verified:
            return
        self._tried *= self._decay
        self._accepted *= self._decay
        self._tried[: min(accepted + 1, verified)] += 1.0
        self._accepted[:accepted] += 1.0

    def chances(self, length: int) -> tuple[float, ...]:
        """Of a block of so many drafts."""
        out, before = [], self._prior
        for tried, accepted in zip(self._tried[:length], self._accepted[:length], strict=True):
            before = float((accepted + before) / (tried + 1.0))
            out.append(before)
        return (*out, *[before] * (length - len(out)))
