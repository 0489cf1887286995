"""How likely drafts are to be accepted: of the blocks that wait, and of those yet to be drafted.

For the waiting blocks: the drafter's confidence, calibrated for the way that the request samples; what the
drafter itself has counted for blocks that it looked up; what was accepted at each position where neither is
known. For blocks yet to come: the survivals of the same request's last block, drawn towards the average as
far as one block tells little about the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.params import SamplingParams
from engine.sequence import Sequence as Text
from scheduler.calibration import Acceptance, Calibration, Regime, sigmoid
from scheduler.policy import Ints
from scheduler.ranking import Floats, survivals
from scheduler.running_calibration import RunningCalibration

_MOST = 64  # positions that any policy verifies
_LIKENESS_DECAY = 0.999  # of what earlier pairs of blocks count
_LIKENESS_PRIOR = 1.0
_MEAN_WEIGHT = 0.02  # of a block in the running mean that stands in for a new sequence's history
REGIMES: tuple[Regime, ...] = ("greedy", "rejection", "coupled")


def regime(params: SamplingParams) -> Regime:
    """How a request's drafts are accepted."""
    if params.greedy:
        return "greedy"
    return "coupled" if params.seed is not None else "rejection"


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of R sequences that wait for verification, of up to L tokens; a sequence may have none.

    length [R], chances [R, L] conditional and 0 past a block's end, guarded [R] (see `scheduler.policy`),
    modelled [R]: drafted by a model, not looked up.
    """

    regimes: tuple[Regime, ...]
    length: Ints
    chances: Floats
    guarded: npt.NDArray[np.bool_]
    modelled: npt.NDArray[np.bool_]


class Survival:
    """Knows calibration tables and remembers what was accepted. `gamma`: the most that is drafted.

    With `online` the running calibration is not only watched but corrects.
    """

    def __init__(self, gamma: int, calibrations: Mapping[Regime, Calibration], online: bool = False) -> None:
        self.gamma, self.calibrations, self._online = gamma, dict(calibrations), online
        most = max(_MOST, gamma)
        self._heat = {name: np.ones(most) for name in REGIMES}
        self._shift = {name: np.zeros(most) for name in REGIMES}
        for name, table in calibrations.items():
            self._heat[name][: len(table.temperatures)] = table.temperatures
            self._shift[name][: len(table.shifts)] = table.shifts
        self.running = {name: RunningCalibration(most) for name in REGIMES}
        self._acceptance = {name: Acceptance(most) for name in REGIMES}
        self._likeness = {name: Likeness() for name in REGIMES}
        self._mean = {name: np.full(gamma, 0.5) for name in REGIMES}  # conditional

    def errors(self) -> tuple[tuple[str, float], ...]:
        """(regime, expected calibration error of conditional acceptance of late), where it is known."""
        found = ((name, running.error) for name, running in self.running.items())
        return tuple((name, error) for name, error in found if error is not None)

    def blocks(self, texts: Sequence[Text]) -> Blocks:
        """What waits; a sequence that prefills has nothing to verify."""
        drafts = [text.draft if text.pending == 1 else None for text in texts]
        if not any(drafts):
            nothing = np.zeros(len(texts), dtype=bool)
            return Blocks((), nothing.astype(np.int64), np.zeros((len(texts), 0)), nothing, nothing)
        regimes = tuple(regime(text.state.params) for text in texts)
        length = np.array([0 if block is None else len(block) for block in drafts], dtype=np.int64)
        size = int(length.max(initial=0))
        chances = np.zeros((len(texts), size))
        modelled, drawn = np.zeros(len(texts), dtype=bool), np.zeros(len(texts), dtype=bool)
        confident: list[int] = []
        for row, (block, name) in enumerate(zip(drafts, regimes, strict=True)):
            if block is None:
                continue
            drawn[row] = block.q is not None and name == "rejection"
            if block.chances is not None:
                chances[row, : len(block)] = block.chances
                continue
            modelled[row] = True
            if block.confidence is None:
                chances[row, : len(block)] = self._acceptance[name].chances(len(block))
            else:
                chances[row, : len(block)] = block.confidence
                confident.append(row)
        if confident:
            chances[confident] = self._calibrated(chances[confident], [regimes[row] for row in confident])
        np.fmax(chances, 0.0, out=chances)  # a confidence that is no number promises nothing
        chances[np.arange(size) >= length[:, None]] = 0.0
        return Blocks(regimes, length, chances, drawn, modelled)

    def _calibrated(self, logits: Floats, regimes: Sequence[Regime]) -> Floats:
        size = logits.shape[1]
        scaled = logits / np.stack([self._heat[name][:size] for name in regimes])
        scaled += np.stack([self._shift[name][:size] for name in regimes])
        if self._online:
            scaled += np.stack([self.running[name].shift[:size] for name in regimes])
        return sigmoid(scaled)

    def lagged(self, texts: Sequence[Text], blocks: Blocks) -> Floats:
        """[R, L] survivals of each sequence's block before, as far as the waiting one reaches.

        Of a block that nothing can bias its own: they may be looked at.
        """
        out = survivals(blocks.chances)
        for row in np.flatnonzero(blocks.guarded).tolist():
            before = self._before(texts[row], blocks.regimes[row])[: blocks.length[row]]
            out[row] = 0.0
            out[row, : len(before)] = before
        return out

    def expected(self, texts: Sequence[Text]) -> Floats:
        """[n, gamma] survivals of a whole block of each sequence, if it were drafted by the model."""
        return np.array([self._before(text, regime(text.state.params)) for text in texts]).reshape(
            len(texts), self.gamma
        )

    def mean(self, name: Regime) -> Floats:
        """[gamma] survivals of an average block."""
        return self._mean[name].cumprod()

    def _before(self, text: Text, name: Regime) -> Floats:
        return self.mean(name) if text.survivals is None else text.survivals

    def observe(self, blocks: Blocks, texts: Sequence[Text], decided: Ints, accepted: Ints) -> None:
        """A step is over: of each waiting block [R] so many drafts were decided on and accepted."""
        size = np.arange(blocks.chances.shape[1])
        if not len(size):
            return
        tried = size < decided[:, None]
        hits = size < accepted[:, None]
        for name in set(blocks.regimes):
            rows = blocks.modelled & np.array([other == name for other in blocks.regimes])
            if not rows.any():
                continue
            self.running[name].observe(blocks.chances[rows], tried[rows], hits[rows])
            for row in np.flatnonzero(rows).tolist():
                self._remember(texts[row], name, blocks.chances[row, : blocks.length[row]])
                block = texts[row].draft
                if block is not None and block.confidence is None:
                    self._acceptance[name].observe(int(decided[row]), int(accepted[row]))

    def _remember(self, text: Text, name: Regime, chances: Floats) -> None:
        chances = chances[: self.gamma]
        mean, size = self._mean[name], len(chances)
        self._likeness[name].observe(text.chances, chances, mean)
        mean[:size] += _MEAN_WEIGHT * (chances - mean[:size])
        # Where it was not drafted: as the others' go on.
        expected = mean.copy()
        expected[:size] += self._likeness[name].value * (chances - mean[:size])
        text.chances, text.survivals = chances, expected.cumprod()
        text.drafted_round = text.round


class Likeness:
    """How much of what sets a block apart from the average is left in the same text's next one.

    A running regression through the origin: 1 if blocks go on as they were, 0 if the last one tells nothing.
    """

    def __init__(self) -> None:
        self._product, self._square = 0.5 * _LIKENESS_PRIOR, _LIKENESS_PRIOR

    @property
    def value(self) -> float:
        return min(max(self._product / self._square, 0.0), 1.0)

    def observe(self, before: Floats | None, now: Floats, mean: Floats) -> None:
        """Conditional chances of two blocks of a text, and of an average one, [up to gamma] each."""
        if before is None:
            return
        size = min(len(before), len(now))
        apart = before[:size] - mean[:size]
        self._product = _LIKENESS_DECAY * self._product + float(apart @ (now[:size] - mean[:size]))
        self._square = _LIKENESS_DECAY * self._square + float(apart @ apart)
