from __future__ import annotations

import pytest

from loadtest.record import Record


def record(times: list[float], counts: list[int], tokens: int | None = None) -> Record:
    return Record(
        "x",
        intended=10.0,
        started=10.1,
        first_text=times[0],
        times=times,
        counts=counts,
        ended=times[-1] + 0.01,
        outcome="ok",
        completion_tokens=counts[-1] if tokens is None else tokens,
    )


def test_latencies_begin_at_the_intended_time() -> None:
    one = record([10.3, 10.4, 10.5], [1, 2, 3])
    assert one.ttft == pytest.approx(0.3)
    assert one.e2e == pytest.approx(0.51)
    assert one.tpot == pytest.approx(0.1)
    assert one.lag == pytest.approx(0.1)


@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_chunks_of_several_tokens_do_not_distort_the_time_per_token(width: int) -> None:
    """Tokens come every 10 ms on average, however many at a time."""
    times = [10.3 + 0.01 * width * place for place in range(12)]
    one = record(times, [width * (place + 1) for place in range(12)])
    assert one.tpot == pytest.approx(0.01)
    assert sum(one.gap_tokens) == 11 * width


def test_without_counts_tokens_are_spread_over_the_chunks() -> None:
    one = record([10.3, 10.5, 10.7, 10.9], [-1, -1, -1, -1], tokens=16)
    assert one.tpot == pytest.approx(0.05)
    assert one.progress == [4, 8, 12, 16]
    assert one.tokens == 16


def test_a_single_chunk_has_no_time_per_token() -> None:
    assert record([10.3], [5]).tpot is None


def test_waiting_for_the_own_limit_is_no_lag() -> None:
    one = Record("x", intended=1.0, started=3.0, queued=1.5)
    assert one.lag == pytest.approx(0.5)
