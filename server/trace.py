"""Engine steps as a Chrome trace (chrome://tracing, ui.perfetto.dev), and how long the worker waited.

Two tracks: the event loop plans, selects, latches and commits; the worker computes. Between two worker calls
lies what the loop must do; anything beyond that is time lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from engine.outputs import StepStats

_LOOP, _WORKER = 1, 2


def chrome_trace(steps: Sequence[StepStats]) -> dict[str, Any]:
    """Events in microseconds from the first step's beginning."""
    names = [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": name}}
        for tid, name in ((_LOOP, "event loop"), (_WORKER, "worker"))
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *_events(steps)]}


def _events(steps: Sequence[StepStats]) -> Iterator[dict[str, Any]]:
    for number, step in enumerate(steps):
        figures = {
            "step": number,
            "rows": step.rows,
            "prefill rows": step.prefill_rows,
            "verified": list(step.verified),
            "accepted": list(step.accepted),
            "slots": list(step.slots),
            "forecast ms": round(1e3 * step.forecast_time, 3),
        }
        done = worker_end(step)
        spans: tuple[tuple[int, str, float, float, dict[str, Any]], ...] = (
            (_LOOP, "plan, select, latch", step.begun, step.latch_time, figures),
            (_WORKER, "forward", step.worker_begun, step.forward_time, figures),
            (_WORKER, "accept", step.worker_begun + step.forward_time, step.verify_time, {}),
            (_WORKER, "draft", done - step.draft_time, step.draft_time, {}),
            (_LOOP, "commit", step.commit_begun, step.begun + step.step_time - step.commit_begun, {}),
        )
        for tid, name, begun, seconds, arguments in spans:
            yield {
                "ph": "X",
                "name": name,
                "pid": 1,
                "tid": tid,
                "ts": round(1e6 * (begun - steps[0].begun), 1),
                "dur": round(1e6 * seconds, 1),
                "args": arguments,
            }


def worker_end(step: StepStats) -> float:
    return step.worker_begun + step.forward_time + step.verify_time + step.draft_time


def waits(steps: Sequence[StepStats]) -> tuple[float, float]:
    """(seconds that the worker waited for its next call, those of them that were not the loop's own work).

    Medians over the steps. The loop's own work is the commit of one step, and then the latching of the next.
    """
    waited, lost = [], []
    for step, following in pairwise(steps):
        wait = following.worker_begun - worker_end(step)
        waited.append(wait)
        commit = step.begun + step.step_time - step.commit_begun
        lost.append(wait - commit - following.latch_time)
    middle = len(waited) // 2
    return (sorted(waited)[middle], sorted(lost)[middle]) if waited else (0.0, 0.0)
