"""Steps as a Chrome trace, and how long the worker waited between them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from engine.outputs import StepStats
from server.trace import chrome_trace, waits


def step(begun: float, worker_begun: float) -> StepStats:
    """Latched within 1 ms, 10 + 2 + 3 ms in the worker, then 2 ms of commit."""
    return StepStats(
        step_time=worker_begun + 0.015 + 0.002 - begun,
        forward_time=0.010,
        draft_time=0.003,
        rows=4,
        prefill_rows=0,
        sequences=2,
        emitted=3,
        begun=begun,
        latch_time=0.001,
        worker_begun=worker_begun,
        verify_time=0.002,
        commit_begun=worker_begun + 0.015,
    )


STEPS = [step(5.0, 5.001), step(5.018, 5.019), step(5.036, 5.0375)]


def test_spans_lie_where_the_time_went():
    trace = json.loads(json.dumps(chrome_trace(STEPS)))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 5 * len(STEPS)
    first = {span["name"]: (span["ts"], span["dur"], span["tid"]) for span in spans[:5]}
    assert first == {
        "plan, select, latch": (0.0, 1000.0, 1),
        "forward": (1000.0, 10000.0, 2),
        "accept": (11000.0, 2000.0, 2),
        "draft": (13000.0, 3000.0, 2),
        "commit": (16000.0, 2000.0, 1),
    }
    assert spans[5]["ts"] == 18000.0
    assert spans[0]["args"]["rows"] == 4


def test_time_before_the_commit_is_lost_and_no_work():
    late = replace(STEPS[0], commit_begun=STEPS[0].commit_begun + 0.0005, step_time=STEPS[0].step_time)
    wait, lost = waits([late, STEPS[1]])
    assert wait == pytest.approx(0.003)
    assert lost == pytest.approx(0.0005)


def test_what_the_worker_waited_beyond_the_loops_own_work():
    """3 ms between calls are commit and latch; before the third call half a millisecond more was lost."""
    wait, lost = waits([STEPS[0], STEPS[1]])
    assert wait == pytest.approx(0.003)
    assert lost == pytest.approx(0.0, abs=1e-9)
    wait, lost = waits(STEPS)
    assert wait == pytest.approx(0.0035)
    assert lost == pytest.approx(0.0005)
    assert waits(STEPS[:1]) == (0.0, 0.0)
