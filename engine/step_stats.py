"""The figures of one step, from what was latched and what came back."""

from __future__ import annotations

from dataclasses import dataclass

from engine.batch import StepResult, VerificationBatch
from engine.outputs import Forecast, StepStats, Undrafted


@dataclass(frozen=True, slots=True)
class Latch:
    """What is known of a step once it is latched.

    `begun` on `time.perf_counter`'s clock and the seconds that latching took; rows that drafts could have;
    drafts that waited, an entry an item; why nothing is drafted.
    """

    begun: float
    seconds: float
    capacity: int
    waiting: tuple[int, ...]
    undrafted: Undrafted | None


def step_stats(
    batch: VerificationBatch,
    result: StepResult,
    latch: Latch,
    forecast: Forecast,
    emitted: int,
    commit_begun: float,
    ended: float,
) -> StepStats:
    """`emitted` tokens went out to users; `commit_begun` and `ended` are on `time.perf_counter`'s clock.

    The step is from the plan to the commit.
    """
    decoding = [
        (item.verify, verdict.accepted, waiting, expected)
        for item, verdict, waiting, expected in zip(
            batch.items, result.verdicts, latch.waiting, forecast.accepted, strict=True
        )
        if item.sample and item.count - item.verify == 1
    ]
    verified, accepted, waited, expected = zip(*decoding, strict=True) if decoding else ((), (), (), ())
    return StepStats(
        step_time=ended - latch.begun,
        forward_time=result.forward_time,
        draft_time=result.draft_time,
        rows=batch.rows,
        prefill_rows=sum(item.count for item in batch.items if item.count - item.verify > 1),
        sequences=len(batch.items),
        emitted=emitted,
        decided=sum(len(verdict.tokens) for verdict in result.verdicts),
        verified=verified,
        accepted=accepted,
        corrupted=sum(verdict.finish == "error" for verdict in result.verdicts),
        waiting=waited,
        expected=expected,
        slots=tuple(item.draft_slots for item in batch.items if item.sample),
        capacity=latch.capacity,
        undrafted=latch.undrafted,
        forecast_tokens=forecast.tokens,
        forecast_time=forecast.seconds,
        begun=latch.begun,
        latch_time=latch.seconds,
        worker_begun=result.begun,
        verify_time=result.verify_time,
        commit_begun=commit_begun,
    )
