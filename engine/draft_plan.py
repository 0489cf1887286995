"""How much a model drafts for whom: as much as the next step should verify, nothing where it does not pay.

Decided before anything is drafted, by survivals of earlier rounds and the measured cost of drafting and
verifying. What is not drafted for is probed now and then, within a small share of the time, so that a change
is noticed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from engine.sequence import Sequence as Text
from scheduler import few
from scheduler.lookahead import best_count
from scheduler.ranking import gains, rank, table
from scheduler.throughput import Throughput

log = logging.getLogger("dspark.engine")

_MARGIN = 1.02  # by which drafting must promise to be faster
_PROBE_SHARE = 0.005  # of the time
_PROBE_SLOTS = 2
_PROBE_ROUNDS = 8  # at least, between two of a sequence
_LONGER_ROUNDS = 8  # after which a block is drafted a token longer, to see more of it
#: without another look, once nothing has paid: as few as a probe takes, then twice as many each time
_REST_STEPS = 2, 16
_COLLAPSED_STEPS = 512  # with drafts that would not even pay for a sequence alone
_WATCH_STEPS = 16


class DraftPlan:
    """Remembers only how much time may go into probes, and for how long drafting has not paid.

    `gamma`: the most that the model drafts.
    """

    def __init__(self, gamma: int) -> None:
        self.gamma = gamma
        self._credit = 0.0
        self._hopeless = self._steps = 0
        self._rest = (0, 0)  # steps left, for so many sequences
        self._resting = 0  # steps of the last rest
        self._rested = 0  # steps since the last look

    @property
    def collapsed(self) -> bool:
        """Whether drafts have long been too bad, or too dear, to pay at any load."""
        return self._hopeless >= _COLLAPSED_STEPS

    def rests(self, count: int) -> bool:
        """Whether drafting for so many sequences was found not to pay a moment ago; asked once a step."""
        left, sequences = self._rest
        if not left or sequences != count:
            return False
        self._rest = left - 1, sequences
        self._rested += 1
        return True

    def slots(
        self,
        texts: Sequence[Text],
        expected: Sequence[Sequence[float]],
        throughput: Throughput,
        caps: Sequence[int],
        room: int,
    ) -> list[int]:
        """Tokens to draft for each sequence, at most its cap; expected [n][gamma] are survivals.

        `room`: rows that the next step will have for drafts.
        """
        count = len(texts)
        context = float(sum(text.length for text in texts))
        allowed = [row[:cap] for row, cap in zip(expected, caps, strict=True)]
        wanted, gain, plain = self._best(allowed, throughput, context, room)
        if gain > _MARGIN:
            self._resting, self._rest = 0, (0, count)
        else:
            wanted = [0] * count
            shortest, longest = _REST_STEPS
            again = self._rest[1] == count and self._resting
            self._resting = min(2 * self._resting, longest) if again else shortest
            self._rest = self._resting, count
        out = [
            min(length + (text.round % _LONGER_ROUNDS == 0), cap) if length else 0
            for text, length, cap in zip(texts, wanted, caps, strict=True)
        ]
        if room:
            self._probe(texts, out, caps, plain, throughput)
        return out

    @staticmethod
    def _best(
        allowed: Sequence[Sequence[float]], throughput: Throughput, context: float, room: int
    ) -> tuple[list[int], float, float]:
        """(tokens for each sequence that promise most, how much faster than none, seconds with none)"""
        count, start = len(allowed), float(len(allowed))
        if sum(map(len, allowed)) <= few.FEW:
            candidates = few.rank(allowed)[:room]
            costs = throughput.few_planned(count, len(candidates), context)
            best = few.best_count(candidates, start, costs)
            tokens = few.gains(start, [survival for survival, _ in candidates[:best]])[-1]
            return few.lengths(candidates[:best], count), tokens / start * costs[0] / costs[best], costs[0]
        ranking = rank(table(allowed))
        most = min(len(ranking), room)
        seconds = throughput.planned(count, most, context)
        best = best_count(ranking.survival[:most], start, seconds)
        tokens = float(gains(start, ranking.survival[:best])[best])
        plain = float(seconds[0])
        return ranking.lengths(best, count), tokens / start * plain / float(seconds[best]), plain

    def _probe(
        self,
        texts: Sequence[Text],
        slots: list[int],
        caps: Sequence[int],
        seconds: float,
        throughput: Throughput,
    ) -> None:
        """Give a few slots to the sequence that has gone without for longest, if the time for it has come."""
        idle = [
            (text.round - text.drafted_round, row)
            for row, text in enumerate(texts)
            if not slots[row] and caps[row] and text.round - text.drafted_round >= _PROBE_ROUNDS
        ]
        share = _PROBE_SHARE / 4 if self.collapsed else _PROBE_SHARE
        self._credit += share * seconds * (1 + self._rested)
        self._rested = 0
        if not idle:
            return
        size = min(_PROBE_SLOTS, self.gamma)
        costs = throughput.few_planned(len(texts), size, throughput.context)
        price = costs[-1] - costs[0]
        if self._credit >= price:
            row = max(idle)[1]
            slots[row] = min(size, caps[row])
            texts[row].drafted_round = texts[row].round  # whatever comes of it, others are next
            if self._rest[0]:  # look again when it has told what it can
                self._resting = _REST_STEPS[0]
                self._rest = self._resting, len(texts)
            self._credit = min(self._credit - price, price)  # no more than one ahead

    def watch(self, means: Callable[[], Mapping[str, Sequence[float]]], throughput: Throughput) -> None:
        """After a step: would average blocks [gamma] of any of these regimes pay for a sequence alone?

        Looked at every few steps.
        """
        self._steps += 1
        if self._steps % _WATCH_STEPS:
            return
        seconds = throughput.planned(1, self.gamma, throughput.context)
        pays = any(
            (gains(1.0, np.array(mean)) / seconds)[1:].max(initial=0.0) > 1.0 / seconds[0]
            for mean in means().values()
        )
        before = self.collapsed
        self._hopeless = 0 if pays else self._hopeless + _WATCH_STEPS
        if self.collapsed and not before:
            log.warning(
                "drafts have long not paid, not even for a sequence alone: they are probed rarely now"
            )
        elif before and pays:
            log.warning("drafts pay again")
