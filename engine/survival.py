"""How likely drafts are to be accepted: of the blocks that wait, and of those yet to be drafted.

For the waiting blocks: the drafter's confidence, calibrated for the way that the request samples; what the
drafter itself has counted for blocks that it looked up; what was accepted at each position where neither is
known. For blocks yet to come: the survivals of the same request's last block, drawn towards the average as
far as one block tells little about the next.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

import numpy as np

from engine.params import SamplingParams
from engine.sequence import Sequence as Text
from scheduler import few
from scheduler.calibration import Acceptance, Calibration, Regime, sigmoid
from scheduler.ranking import Floats, survivals, table
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
    """The blocks of R sequences that wait for verification; a sequence may have none.

    length [R]; chances [R][L], conditional and 0 past a block's end, and their survivals `alive`; guarded [R]
    (see `scheduler.policy`); modelled [R]: drafted by a model, not looked up. R is 0 if there are no blocks.
    Plain numbers, since blocks are short and most steps have few of them; `many` are chances and survivals
    as arrays [R, L], where there are many.
    """

    regimes: tuple[Regime, ...] = ()
    length: list[int] = field(default_factory=list)
    chances: list[list[float]] = field(default_factory=list)
    alive: list[list[float]] = field(default_factory=list)
    guarded: list[bool] = field(default_factory=list)
    modelled: list[bool] = field(default_factory=list)
    many: tuple[Floats, Floats] | None = None


class Survival:
    """Knows calibration tables and remembers what was accepted. `gamma`: the most that is drafted.

    With `online` the running calibration is not only watched but corrects.
    """

    def __init__(self, gamma: int, calibrations: Mapping[Regime, Calibration], online: bool = False) -> None:
        self.gamma, self.calibrations, self._online = gamma, dict(calibrations), online
        most = max(_MOST, gamma)
        self._heat = {name: [1.0] * most for name in REGIMES}
        self._shift = {name: [0.0] * most for name in REGIMES}
        for name, fitted in calibrations.items():
            self._heat[name][: len(fitted.temperatures)] = fitted.temperatures
            self._shift[name][: len(fitted.shifts)] = fitted.shifts
        self.running = {name: RunningCalibration(most) for name in REGIMES}
        self._acceptance = {name: Acceptance(most) for name in REGIMES}
        self._likeness = {name: Likeness() for name in REGIMES}
        self._mean = {name: [0.5] * gamma for name in REGIMES}  # conditional

    def errors(self) -> tuple[tuple[str, float], ...]:
        """(regime, expected calibration error of conditional acceptance of late), where it is known."""
        found = ((name, running.error) for name, running in self.running.items())
        return tuple((name, error) for name, error in found if error is not None)

    def blocks(self, texts: Sequence[Text]) -> Blocks:
        """What waits; a sequence that prefills has nothing to verify."""
        drafts = [text.draft if text.pending == 1 else None for text in texts]
        if not any(drafts):
            return Blocks()
        regimes = tuple(regime(text.state.params) for text in texts)
        rows: list[Sequence[float]] = []
        guarded, modelled, confident = [], [], []
        for block, name in zip(drafts, regimes, strict=True):
            guarded.append(block is not None and block.q is not None and name == "rejection")
            modelled.append(block is not None and block.chances is None)
            confident.append(block is not None and block.chances is None and block.confidence is not None)
            if block is None:
                rows.append(())
            else:
                rows.append(block.chances or block.confidence or self._acceptance[name].chances(len(block)))
        length = [len(row) for row in rows]
        widest = max(length)
        if sum(length) > few.FEW:
            chances = self._many_chances(rows, regimes, confident)
            alive = survivals(chances)
            return Blocks(
                *(regimes, length, chances.tolist(), alive.tolist(), guarded, modelled), (chances, alive)
            )
        plain = [
            [*(self._calibrated(row, name) if sure else map(_sane, row)), *[0.0] * (widest - len(row))]
            for row, name, sure in zip(rows, regimes, confident, strict=True)
        ]
        return Blocks(regimes, length, plain, few.survivals(plain), guarded, modelled)

    def _calibrated(self, logits: Sequence[float], name: Regime) -> list[float]:
        out, running = [], self.running[name].shift if self._online else None
        for place, (logit, heat, shift) in enumerate(
            zip(logits, self._heat[name], self._shift[name], strict=False)
        ):
            scaled = logit / heat + (shift if running is None else shift + running[place])
            out.append(_sane(0.5 * (1.0 + math.tanh(0.5 * scaled))))
        return out

    def _many_chances(
        self, rows: Sequence[Sequence[float]], regimes: Sequence[Regime], confident: Sequence[bool]
    ) -> Floats:
        """The same with arrays."""
        chances, sure = table(rows), np.array(confident)
        size = chances.shape[1]
        if sure.any():
            of = np.array([REGIMES.index(name) for name in regimes])[sure]
            heat, shift = (
                np.array([each[name][:size] for name in REGIMES]) for each in (self._heat, self._shift)
            )
            if self._online:
                shift += np.array([self.running[name].shift[:size] for name in REGIMES])
            chances[sure] = sigmoid(chances[sure] / heat[of] + shift[of])
        chances[np.arange(size) >= np.array([len(row) for row in rows])[:, None]] = 0.0
        return np.fmax(chances, 0.0)

    def lagged(self, texts: Sequence[Text], blocks: Blocks) -> list[list[float]]:
        """[R][L] survivals of each sequence's block before, as far as the waiting one reaches.

        Of a block that nothing can bias its own: they may be looked at.
        """
        out = list(blocks.alive)
        for row, held in enumerate(blocks.guarded):
            if held:
                before = self._before(texts[row], blocks.regimes[row])[: blocks.length[row]]
                out[row] = [*before, *[0.0] * (len(out[row]) - len(before))]
        return out

    def many_lagged(self, texts: Sequence[Text], blocks: Blocks) -> Floats:
        """The same of many blocks, as an array [R, L]."""
        assert blocks.many is not None
        out = blocks.many[1].copy()
        for row, held in enumerate(blocks.guarded):
            if held:
                before = self._before(texts[row], blocks.regimes[row])[: blocks.length[row]]
                out[row] = 0.0
                out[row, : len(before)] = before
        return out

    def expected(self, texts: Sequence[Text]) -> list[list[float]]:
        """[n][gamma] survivals of a whole block of each sequence, if it were drafted by the model."""
        return [self._before(text, regime(text.state.params)) for text in texts]

    def mean(self, name: Regime) -> list[float]:
        """[gamma] survivals of an average block."""
        return _survivals(self._mean[name])

    def _before(self, text: Text, name: Regime) -> list[float]:
        return self.mean(name) if text.survivals is None else text.survivals

    def observe(
        self, blocks: Blocks, texts: Sequence[Text], decided: Sequence[int], accepted: Sequence[int]
    ) -> None:
        """A step is over: of each waiting block [R] so many drafts were decided on and accepted."""
        for row, (text, drawn) in enumerate(zip(texts, blocks.modelled, strict=True)):
            if not drawn:
                continue
            name, own = blocks.regimes[row], blocks.chances[row][: blocks.length[row]]
            self.running[name].observe(own, decided[row], accepted[row])
            self._remember(text, name, own)
            if text.draft is not None and text.draft.confidence is None:
                self._acceptance[name].observe(decided[row], accepted[row])

    def _remember(self, text: Text, name: Regime, chances: list[float]) -> None:
        chances = chances[: self.gamma]
        mean = self._mean[name]
        self._likeness[name].observe(text.chances, chances, mean)
        likeness, expected = self._likeness[name].value, []
        for place, chance in enumerate(chances):
            mean[place] += _MEAN_WEIGHT * (chance - mean[place])
            expected.append(mean[place] + likeness * (chance - mean[place]))
        # Where it was not drafted: as the others' go on.
        text.chances, text.survivals = chances, _survivals([*expected, *mean[len(chances) :]])
        text.drafted_round = text.round


def _sane(chance: float) -> float:
    return chance if chance > 0.0 else 0.0  # a confidence that is no number promises nothing


def _survivals(chances: Sequence[float]) -> list[float]:
    return list(accumulate(chances, mul))


class Likeness:
    """How much of what sets a block apart from the average is left in the same text's next one.

    A running regression through the origin: 1 if blocks go on as they were, 0 if the last one tells nothing.
    """

    def __init__(self) -> None:
        self._product, self._square = 0.5 * _LIKENESS_PRIOR, _LIKENESS_PRIOR

    @property
    def value(self) -> float:
        return min(max(self._product / self._square, 0.0), 1.0)

    def observe(self, before: Sequence[float] | None, now: Sequence[float], mean: Sequence[float]) -> None:
        """Conditional chances of two blocks of a text, and of an average one, [up to gamma] each."""
        if before is None:
            return
        product = square = 0.0
        for then, chance, average in zip(before, now, mean, strict=False):
            product += (then - average) * (chance - average)
            square += (then - average) ** 2
        self._product = _LIKENESS_DECAY * self._product + product
        self._square = _LIKENESS_DECAY * self._square + square
