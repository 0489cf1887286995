"""Confidence that means what it says: sequential temperature scaling (paper section 3.2.1), and a shift.

Position by position from the left, one temperature each, chosen so that the product of scaled chances up to
there predicts how often that many drafts are accepted. The paper has temperatures alone. The shift makes the
mean right: the head was trained for rejection sampling, and what greedy or seeded requests accept is another
function. Only rounds that verified every draft may be used: trimmed ones hide what would have happened.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from scheduler.ranking import Floats

Regime = Literal["greedy", "rejection", "coupled"]

#: where tables lie, beside the draft model
CALIBRATION_FILE = "calibration.json"

_GRID = np.geomspace(0.1, 10.0, 41)
_BINS = 15
_MOST_SHIFT = 4.0


@dataclass(frozen=True, slots=True)
class Calibration:
    """Temperatures and shifts by position for one drafter and one way of sampling, and what they are worth.

    Errors are expected calibration errors of survival by position: as it came, with the best temperatures
    alone, with shifts too, and what would be seen of perfect chances in a sample of this size.
    """

    regime: Regime
    temperatures: tuple[float, ...]
    shifts: tuple[float, ...] = ()
    samples: int = 0
    ece_before: tuple[float, ...] = ()
    ece_temperatures: tuple[float, ...] = ()
    ece_after: tuple[float, ...] = ()
    ece_noise: tuple[float, ...] = ()

    def apply(self, logits: Floats) -> Floats:
        """Conditional chances [..., n] from raw confidence logits, as far as there are temperatures."""
        count = min(logits.shape[-1], len(self.temperatures))
        shifts = np.zeros(count) if not self.shifts else np.array(self.shifts[:count])
        return sigmoid(logits[..., :count] / np.array(self.temperatures[:count]) + shifts)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Calibration:
        """Raises ValueError for a table that cannot be one."""
        if not isinstance(raw, Mapping):
            raise ValueError("no calibration: a table is a JSON object")
        known: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in raw.items()
        }
        try:
            table = cls(**known)
        except TypeError as error:
            raise ValueError(f"no calibration: {error}") from None
        if table.regime not in get_args(Regime):
            raise ValueError(f"no calibration: unknown regime {table.regime!r}")
        numbers = (*table.temperatures, *table.shifts)
        if not all(isinstance(number, (int, float)) and math.isfinite(number) for number in numbers):
            raise ValueError("calibration temperatures and shifts must be numbers")
        if not all(temperature > 0.0 for temperature in table.temperatures):
            raise ValueError("calibration temperatures must be positive")
        if table.shifts and len(table.shifts) != len(table.temperatures):
            raise ValueError("a calibration needs a shift for each temperature, or none")
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
    plain = Calibration(regime, (1.0,) * gamma)
    scaled = Calibration(regime, _sequential(logits, accepted, shifted=False)[0])
    shifted = Calibration(regime, *_sequential(logits, accepted, shifted=True))
    judged = held_out or (logits, accepted)
    before, temperatures, after = (errors(table, *judged) for table in (plain, scaled, shifted))
    noise = _noise(shifted, judged[0])
    return Calibration(
        regime, shifted.temperatures, shifted.shifts, rounds, before, temperatures, after, noise
    )


def _sequential(
    logits: Floats, accepted: npt.NDArray[np.int64], shifted: bool
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Best temperatures and shifts (or zeros), each given those before it."""
    survival, temperatures, shifts = np.ones(len(logits)), [], []
    for k in range(logits.shape[1]):
        survived = accepted > k
        best, least = (1.0, 0.0), np.inf
        for temperature in _GRID:
            scaled = logits[:, k] / temperature
            shift = _balance(survival, scaled, float(survived.sum())) if shifted else 0.0
            error = expected_calibration_error(survival * sigmoid(scaled + shift), survived)
            if error < least:  # of equals the first
                best, least = (float(temperature), shift), error
        survival = survival * sigmoid(logits[:, k] / best[0] + best[1])
        temperatures.append(best[0])
        shifts.append(best[1])
    return tuple(temperatures), tuple(shifts)


def _balance(survival: Floats, scaled: Floats, wanted: float) -> float:
    """The shift with which as many are expected to survive as did."""
    low, high = -_MOST_SHIFT, _MOST_SHIFT
    for _ in range(20):
        middle = 0.5 * (low + high)
        if float((survival * sigmoid(scaled + middle)).sum()) < wanted:
            low = middle
        else:
            high = middle
    return 0.5 * (low + high)


def errors(table: Calibration, logits: Floats, accepted: npt.NDArray[np.int64]) -> tuple[float, ...]:
    """Expected calibration error of survival at each position with this table."""
    survival = table.apply(logits).cumprod(axis=1)
    return tuple(expected_calibration_error(survival[:, k], accepted > k) for k in range(survival.shape[1]))


def _noise(table: Calibration, logits: Floats) -> tuple[float, ...]:
    """The same if the table were exactly right: mean of a few draws."""
    rng, survival = np.random.default_rng(0), table.apply(logits).cumprod(axis=1)
    draws = [rng.random(survival.shape) < survival for _ in range(8)]
    return tuple(
        float(np.mean([expected_calibration_error(survival[:, k], drawn[:, k]) for drawn in draws]))
        for k in range(survival.shape[1])
    )


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

    def observe(self, decided: int, accepted: int) -> None:
        """A round decided on so many drafts and accepted so many."""
        if not decided:
            return
        self._tried *= self._decay
        self._accepted *= self._decay
        self._tried[:decided] += 1.0
        self._accepted[:accepted] += 1.0

    def chances(self, length: int) -> tuple[float, ...]:
        """Of a block of so many drafts."""
        out, before = [], self._prior
        for tried, accepted in zip(self._tried[:length], self._accepted[:length], strict=True):
            before = float((accepted + before) / (tried + 1.0))
            out.append(before)
        return (*out, *[before] * (length - len(out)))
