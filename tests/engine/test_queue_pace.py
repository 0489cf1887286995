"""How long a newcomer would wait: seats a second while somebody is kept waiting, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.queue_pace import QueuePace


def test_nothing_known_is_guessed() -> None:
    assert QueuePace().wait(6, 0.0, 0.5) == 3.0


def test_seats_taken_at_once_say_nothing() -> None:
    pace = QueuePace()
    for now in range(10):
        pace.admitted(1, False, float(now))
    assert pace.wait(4, 9.0, 0.5) == 2.0


def test_time_in_which_nobody_waited_is_left_out() -> None:
    pace = QueuePace()
    pace.admitted(32, True, 0.0)
    pace.admitted(8, False, 4.0)  # half a second each
    pace.admitted(32, True, 1000.0)
    pace.admitted(2, False, 1001.0)
    assert pace.wait(10, 1001.0, 99.0) == pytest.approx(5.0)


def test_a_queue_that_stands_still_is_noticed() -> None:
    pace = QueuePace()
    pace.admitted(1, True, 0.0)
    pace.admitted(1, True, 0.1)
    assert pace.wait(3, 0.15, 0.0) == pytest.approx(0.3)
    assert pace.wait(3, 20.1, 0.0) == pytest.approx(60.0)


@given(st.floats(0.01, 10.0), st.floats(0.01, 10.0), st.integers(1, 8))
def test_a_new_pace_is_learnt(first: float, second: float, seated: int) -> None:
    pace, now = QueuePace(), 0.0
    pace.admitted(0, True, now)
    for each in (first, second):
        for _ in range(400):
            now += each * seated
            pace.admitted(seated, True, now)
        assert pace.wait(7, now, 0.0) == pytest.approx(7 * each, rel=0.01)
