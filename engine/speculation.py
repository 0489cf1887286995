"""What the verification policy is told, and the draft plan: how far blocks are verified, how much is drafted.

Drafting is a decision too. Lagged survivals and the measured cost of a draft say whether the next step would
be faster with drafts than without, and for whom: slots that would not be verified are not drafted. What has
not been drafted for is probed now and then, so that a change is noticed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import mul

import numpy as np

from engine.batch import StepResult, VerificationBatch
from engine.params import SamplingParams
from engine.sequence import Sequence as Text
from scheduler.calibration import Acceptance, Calibration, Regime
from scheduler.lookahead import best_count
from scheduler.policy import Choice, Drafted, VerifyPolicy
from scheduler.ranking import gains, rank
from scheduler.throughput import Throughput

_PROBE = 16  # rounds after which a sequence that is not drafted for is drafted for all the same
_PROBE_SLOTS = 2
_MOST = 64  # positions that any policy verifies
_MEAN_WEIGHT = 0.02  # of a round in the running mean that stands in for a new sequence's history


def regime(params: SamplingParams) -> Regime:
    """How a request's drafts are accepted."""
    if params.greedy:
        return "greedy"
    return "coupled" if params.seed is not None else "rejection"


class Speculation:
    """Owns the policy and its memory; called by the loop only.

    `gamma` is the most that the drafter drafts. Policies that weigh time need `throughput`.
    """

    def __init__(
        self,
        policy: VerifyPolicy,
        gamma: int = 0,
        throughput: Throughput | None = None,
        calibrations: Mapping[Regime, Calibration] | None = None,
    ) -> None:
        self.policy, self.gamma, self.throughput = policy, gamma, throughput
        self._calibrations = dict(calibrations or {})
        self._acceptance = {name: Acceptance(_MOST) for name in ("greedy", "rejection", "coupled")}
        self._mean = np.full(_MOST, 0.5).cumprod()
        self._draft_time = (0, 0.0)  # sequences and seconds of the last draft

    # ---- how far is verified

    def lengths(self, members: Sequence[Text], rows: int, spare_rows: int, load: float) -> list[int]:
        """Verify lengths of these sequences' blocks, in a step that has `rows` rows without any."""
        blocks = [self._drafted(text) for text in members]
        cap = min(spare_rows, sum(block.length for block in blocks))
        if not cap:
            return [0] * len(members)
        choice = Choice(blocks, sum(text.pending == 1 for text in members), cap, load=load)
        if self.throughput is not None:
            drafting = sum(bool(block.length) for block in blocks)
            seconds = self.throughput.seconds(rows, cap, sum(text.length for text in members), drafting)
            choice = Choice(blocks, choice.sequences, cap, seconds, load)
        return self.policy.select(choice)

    def _drafted(self, text: Text) -> Drafted:
        """A sequence's block as a policy may see it. One that prefills has none to verify."""
        block = text.draft
        if block is None or text.pending != 1:
            return Drafted(0)
        lagged = text.survivals or tuple(self._mean[: len(block)].tolist())
        guarded = block.q is not None and regime(text.state.params) == "rejection"
        return Drafted(len(block), self.chances(text), lagged, guarded)

    def chances(self, text: Text) -> tuple[float, ...]:
        """That each of a sequence's drafts is accepted if those before it are."""
        block, name = text.draft, regime(text.state.params)
        assert block is not None
        if block.confidence is None:
            return self._acceptance[name].chances(len(block))
        table = self._calibrations.get(name)
        heats = table.temperatures if table is not None else ()
        heats = (*heats, *[1.0] * (len(block) - len(heats)))
        return tuple(_sigmoid(logit / heat) for logit, heat in zip(block.confidence, heats, strict=False))

    # ---- how much is drafted

    def slots(self, members: Sequence[Text], caps: Sequence[int | None]) -> list[int]:
        """Tokens to draft after this step for each sequence that will sample in it, at most its cap."""
        most = self.policy.slots()
        if most is None and self.throughput is not None:
            wanted = self._worthwhile(members)
        elif most is None:
            wanted = [self.gamma] * len(members)
        else:
            wanted = [most] * len(members)
        return [slots if cap is None else min(slots, cap) for slots, cap in zip(wanted, caps, strict=True)]

    def _worthwhile(self, members: Sequence[Text]) -> list[int]:
        """By lagged survivals: as many as the best batch would verify, and one more to see if that grows."""
        assert self.throughput is not None
        count = len(members)
        if not count:
            return []
        mean = tuple(self._mean[: self.gamma].tolist())
        # The block that waits now is history by the time the next one is verified.
        chances = [_conditional(text.survivals or mean) for text in members]
        ranking = rank(chances)
        context = float(sum(text.length for text in members))
        plain = count / float(self.throughput.seconds(count, 0, context, 0)[0])
        seconds = self.throughput.seconds(count, len(ranking), context, count)
        best = best_count(ranking.survival, float(count), seconds)
        rate = float(gains(float(count), ranking.survival)[best] / seconds[best])
        lengths = ranking.lengths(best, count) if rate > plain else [0] * count
        out = []
        for text, length in zip(members, lengths, strict=True):
            if length:
                out.append(min(length + 1, self.gamma))
            else:
                probe = text.round - text.drafted_round >= _PROBE
                out.append(min(_PROBE_SLOTS, self.gamma) if probe else 0)
        return out

    # ---- what came of it

    def observe(self, batch: VerificationBatch, result: StepResult, texts: Sequence[Text]) -> None:
        """A step is over: `texts` are its items' sequences, each still with the block that was verified."""
        for item, verdict, text in zip(batch.items, result.verdicts, texts, strict=True):
            if text.draft is not None and text.pending == 1:
                text.survivals = tuple(accumulate(self.chances(text), mul))
                text.drafted_round = text.round
                size = len(text.survivals)
                self._mean[:size] += _MEAN_WEIGHT * (np.array(text.survivals) - self._mean[:size])
            if item.verify:
                self._acceptance[regime(item.state.params)].observe(item.verify, verdict.accepted)
        if self.throughput is not None:
            context = float(sum(item.start + item.count for item in batch.items))
            # How long the waiting blocks took may tell what is in them: it counts once they are decided.
            self.throughput.observe(batch.rows, context, result.forward_time, *self._draft_time)
            self._draft_time = (sum(draft is not None for draft in result.drafts), result.draft_time)


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x > -700.0 else 0.0


def _conditional(survivals: tuple[float, ...]) -> list[float]:
    """Chances whose running products are these survivals."""
    before, out = 1.0, []
    for alive in survivals:
        out.append(alive / before if before > 0.0 else 0.0)
        before = alive
    return out
