"""What the loop asks about speculation: how far blocks are verified, how much is drafted, what was foreseen.

Puts together the policy, the throughput model, how likely drafts are to be accepted (`engine.survival`) and
the draft plan (`engine.draft_plan`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.batch import StepResult, VerificationBatch
from engine.draft_plan import DraftPlan
from engine.lookup_plan import LookupPlan
from engine.outputs import Forecast, Undrafted
from engine.sequence import Sequence as Text
from engine.survival import REGIMES, Blocks, Survival, regime
from scheduler.calibration import Calibration, Regime
from scheduler.policy import Choice, FewChoice, VerifyPolicy
from scheduler.throughput import Throughput


@dataclass(frozen=True, slots=True)
class Slots:
    """Tokens to draft for a sequence: by a model at most `model`, looked up at most `lookup`."""

    model: int = 0
    lookup: int = 0

    def __bool__(self) -> bool:
        return bool(self.model or self.lookup)

    @property
    def most(self) -> int:
        return max(self.model, self.lookup)


@dataclass(frozen=True, slots=True)
class Step:
    """A step without any drafts: its rows, how many sequences sample in it, rows that drafts may have."""

    rows: int
    sampling: int
    spare_rows: int


class Speculation:
    """Owns the policy and its memory; called by the loop only.

    `gamma` is the most that a draft model drafts, `lookup` what may be proposed besides at no cost worth
    counting. Policies that weigh time need `throughput`.
    """

    def __init__(
        self,
        policy: VerifyPolicy,
        gamma: int = 0,
        throughput: Throughput | None = None,
        calibrations: Mapping[Regime, Calibration] | None = None,
        lookup: int = 0,
        online_calibration: bool = False,
    ) -> None:
        self.policy, self.gamma, self.lookup, self.throughput = policy, gamma, lookup, throughput
        self.survival = Survival(gamma, calibrations or {}, online_calibration)
        self.plan, self.lookups = DraftPlan(gamma), LookupPlan()
        self._blocks: Blocks | None = None  # of the step that is being latched
        self._capped = False  # whether nobody in it may be drafted for
        self._plain: float | None = None  # seconds that it would take without verifying any drafts
        self._draft = (0, 0.0)  # tokens and seconds of the last draft
        self._rest = (0, 0, 0.0)  # drafts verified, tokens and seconds of deciding, of the last step
        self._looked_up: float | None = None  # seconds in which plain steps bring what it was expected to

    # ---- how far is verified

    def lengths(self, members: Sequence[Text], step: Step, slots: Sequence[Slots], load: float) -> list[int]:
        """Verify lengths of these sequences' blocks; `slots` are drafted after the step."""
        blocks = self._blocks = self.survival.blocks(members)
        cap = min(step.spare_rows, sum(blocks.length))
        self._plain = None
        if not cap:
            return [0] * len(members)
        context, drafted = sum(text.length for text in members), sum(each.model for each in slots)
        cost = (step.rows, cap, float(context), drafted)
        if blocks.many is None:
            seconds = [] if self.throughput is None else self.throughput.few_seconds(*cost)
            self._plain = seconds[0] if seconds else None
            lagged = self.survival.lagged(members, blocks)
            known = (blocks.length, blocks.chances, blocks.alive, lagged, blocks.guarded)
            return self.policy.select_few(FewChoice(*known, step.sampling, cap, seconds, load))
        times = np.zeros(0) if self.throughput is None else self.throughput.seconds(*cost)
        self._plain = float(times[0]) if len(times) else None
        length, guarded = np.array(blocks.length, dtype=np.int64), np.array(blocks.guarded)
        many = (length, blocks.many[0], self.survival.many_lagged(members, blocks), guarded)
        return self.policy.select(Choice(*many, step.sampling, cap, times, load))

    # ---- how much is drafted

    def slots(self, members: Sequence[Text], caps: Sequence[int | None], room: int) -> list[Slots]:
        """For each sequence that will sample in this step, at most its cap.

        `room`: rows that the next step will have for drafts.
        """
        most = self.policy.slots()
        self._capped = all(cap == 0 for cap in caps)
        if not members or most == 0:
            return [Slots()] * len(members)
        if most is not None:
            sizes = [most if cap is None else min(most, cap) for cap in caps]
            # Prompt lookup alone has no model; where neither is known, whatever drafts may have them all.
            by_model = self.gamma if self.gamma else 0 if self.lookup else most
            return [Slots(min(size, by_model), size) for size in sizes]
        lookup = self.lookup if self.lookups.wanted() else 0
        if self.throughput is not None and (not self.gamma or self.plan.rests(len(members))):
            if not lookup:
                return [Slots()] * len(members)
            wanted = [0] * len(members)
        else:
            limits = [self.gamma if cap is None else min(self.gamma, cap) for cap in caps]
            wanted = limits
            if self.throughput is not None:
                expected = self.survival.expected(members)
                wanted = self.plan.slots(members, expected, self.throughput, limits, room)
        free = [lookup if cap is None else min(lookup, cap) for cap in caps]
        return [Slots(*each) for each in zip(wanted, free, strict=True)]

    def undrafted(self, batch: VerificationBatch, short: bool) -> Undrafted | None:
        """Why no model drafts after this step; `short`: some had to go without for want of pages."""
        sampling = [item for item in batch.items if item.sample]
        if not self.gamma or not sampling or any(item.draft_slots for item in sampling):
            return None
        if self.policy.slots() == 0:
            return "off"
        if short:
            return "kv_pressure"
        if self._capped:
            return "request"
        return "collapsed" if self.plan.collapsed else "does_not_pay"

    def state(self) -> dict[str, Any]:
        """What it knows, for operators."""
        return {
            "policy": self.policy.name,
            "gamma": self.gamma,
            "collapsed": self.plan.collapsed,
            "expected_survival": {name: self.survival.mean(name) for name in REGIMES},
            "calibration_error": dict(self.survival.errors()),
            "throughput": None if self.throughput is None else self.throughput.to_dict(),
        }

    # ---- what came of it

    def observe(self, batch: VerificationBatch, result: StepResult, texts: Sequence[Text]) -> Forecast:
        """The worker is done; says what was expected of the step.

        `texts` are its items' sequences, each still with the block that was verified.
        """
        blocks = self._blocks
        assert blocks is not None
        forecast = self._forecast(batch, blocks)
        if blocks.regimes:  # most steps under load have no drafts, and little time to spare
            self._learn(batch, result, texts, blocks, forecast)
        if self.throughput is not None:
            self._refresh(batch, result)
            if self.policy.slots() is None and self.gamma:
                self.plan.watch(lambda: self._means(texts), self.throughput)
        return forecast

    def _means(self, texts: Sequence[Text]) -> dict[str, list[float]]:
        return {name: self.survival.mean(name) for name in {regime(text.state.params) for text in texts}}

    def _learn(
        self,
        batch: VerificationBatch,
        result: StepResult,
        texts: Sequence[Text],
        blocks: Blocks,
        forecast: Forecast,
    ) -> None:
        """From the blocks that waited: what looking up was worth, what became of the drafts."""
        looked_up = sum(
            length for length, model in zip(blocks.length, blocks.modelled, strict=True) if not model
        )
        if self.throughput is not None and self._plain and looked_up:
            sampling = sum(item.sample for item in batch.items)
            plain = self._plain + self.throughput.per_token * sampling
            self._looked_up = forecast.tokens / sampling * plain
        verdicts = list(zip(batch.items, result.verdicts, strict=True))
        decided = [verdict.decided(item.verify) for item, verdict in verdicts]
        self.survival.observe(blocks, texts, decided, [verdict.accepted for _, verdict in verdicts])

    def _forecast(self, batch: VerificationBatch, blocks: Blocks) -> Forecast:
        """As it was foreseen when the step was latched: nothing has been learnt from it yet."""
        expected = [0.0] * len(batch.items)
        if blocks.regimes:
            expected = [sum(row[: item.verify]) for row, item in zip(blocks.alive, batch.items, strict=True)]
        tokens = sum(item.sample for item in batch.items) + sum(expected)
        seconds = 0.0
        if self.throughput is not None:
            slots = sum(item.draft_slots for item in batch.items)
            drafts = sum(item.verify for item in batch.items)
            seconds = self.throughput.step(batch.rows, drafts, _context(batch), slots)
            seconds += self.throughput.per_token * tokens
        return Forecast(tokens, seconds, tuple(expected))

    def spent(self, seconds: float, worker_seconds: float) -> None:
        """Seconds that the step took, its commit included, and the worker's part of them."""
        if self.throughput is not None:
            self.throughput.observe_rest(*self._rest, seconds - worker_seconds)
        if self._looked_up is not None:
            self.lookups.observe(self._looked_up / seconds - 1.0)
            self._looked_up = None

    def _refresh(self, batch: VerificationBatch, result: StepResult) -> None:
        assert self.throughput is not None
        emitted = sum(len(verdict.tokens) for verdict in result.verdicts)
        if any(item.count - item.verify > 1 for item in batch.items):
            emitted = 0  # what a prefill's rows take besides must not count as a token's
        self.throughput.observe(batch.rows, _context(batch), result.forward_time)
        self._rest = sum(item.verify for item in batch.items), emitted, result.verify_time
        # How long the waiting blocks took may tell what is in them: it counts once they are decided.
        self.throughput.observe_draft(*self._draft)
        drafted = sum(len(draft) for draft in result.drafts if draft is not None and draft.chances is None)
        self._draft = drafted, result.draft_time


def _context(batch: VerificationBatch) -> float:
    return float(sum(item.start + item.count for item in batch.items))
