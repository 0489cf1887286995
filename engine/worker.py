"""One worker call: verify the latched batch, then draft for the next step. Runs off the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.batch import BatchItem, DraftBlock, StepResult, Verdict, VerificationBatch
from engine.drafter import Drafter, DraftRequest
from engine.executor import Executor
from engine.laps import HostLaps, Laps
from engine.verification import verify

#: items and their logits -> verdicts: `engine.verification.verify`, or the same on another device
Verify = Callable[[Sequence[BatchItem], torch.Tensor], list[Verdict]]


class Worker:
    """Owns nothing but its tools: all state is in the executor, the drafter and the batch."""

    def __init__(
        self,
        executor: Executor,
        drafter: Drafter | None,
        verify: Verify = verify,
        laps: Callable[[], Laps] = HostLaps,
    ) -> None:
        self.executor = executor
        self.drafter = drafter
        self.verify = verify
        self.laps = laps

    @torch.inference_mode()
    def run(self, batch: VerificationBatch) -> StepResult:
        """Forward, accept and correct, then draft. Raises whatever the executor raises."""
        begun, laps = time.perf_counter(), self.laps()
        laps.lap()
        drafter = self.drafter
        output = self.executor.forward(batch, drafter.feature_layers if drafter else ())
        laps.lap()
        verdicts = self.verify(batch.items, output.logits)
        if drafter is not None:
            drafter.observe(batch, output.features, verdicts)
        laps.lap()
        drafts: Sequence[DraftBlock | None] = [None] * len(batch.items)
        if drafter is not None:
            drafts = self._draft(drafter, batch, verdicts)
        laps.lap()
        return StepResult(tuple(verdicts), tuple(drafts), begun, *laps.seconds())

    @staticmethod
    def _draft(
        drafter: Drafter, batch: VerificationBatch, verdicts: Sequence[Verdict]
    ) -> list[DraftBlock | None]:
        """Draft for the items that the plan names and that go on; never past what they may still emit."""
        drafts: list[DraftBlock | None] = [None] * len(batch.items)
        wanted: list[int] = []
        requests: list[DraftRequest] = []
        for index, (item, verdict) in enumerate(zip(batch.items, verdicts, strict=True)):
            # The next step emits one token more than it verifies.
            room = item.budget - len(verdict.tokens) - 1
            slots, lookup = min(item.draft_slots, room), min(item.lookup_slots, room)
            if max(slots, lookup) < 1 or verdict.finish is not None or not item.sample:
                continue
            known = item.history[: item.start + item.count - item.verify]
            tokens = np.concatenate((known, np.asarray(verdict.tokens, dtype=np.int32)))
            wanted.append(index)
            requests.append(
                DraftRequest(item.sequence, tokens, slots, item.round + 1, item.pages, item.state, lookup)
            )
        if requests:
            for index, block in zip(wanted, drafter.draft(requests), strict=True):
                drafts[index] = block if block is not None and len(block) else None
        return drafts
