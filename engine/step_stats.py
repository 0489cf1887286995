"""The figures of one step, from what was latched and what came back."""

from __future__ import annotations

from engine.batch import StepResult, VerificationBatch
from engine.outputs import StepStats


def step_stats(batch: VerificationBatch, result: StepResult, seconds: float) -> StepStats:
    """`seconds` are the whole step's, from before the plan until after the commit."""
    decoding = [
        (item.verify, verdict.accepted)
        for item, verdict in zip(batch.items, result.verdicts, strict=True)
        if item.sample and item.count - item.verify == 1
    ]
    return StepStats(
        step_time=seconds,
        forward_time=result.forward_time,
        draft_time=result.draft_time,
        rows=batch.rows,
        prefill_rows=sum(item.count for item in batch.items if item.count - item.verify > 1),
        sequences=len(batch.items),
        emitted=sum(len(verdict.tokens) for verdict in result.verdicts),
        verified=tuple(verify for verify, _ in decoding),
        accepted=tuple(accepted for _, accepted in decoding),
        corrupted=sum(verdict.finish == "error" for verdict in result.verdicts),
    )
