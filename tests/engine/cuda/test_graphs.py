"""Sizes of graphs, and that the stand-in refuses what a graph cannot do."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.cuda.graphs import LARGEST, bucket_for, bucket_sizes, capture_all
from tests.engine.cuda.tape import CannotCapture, TapeGraphs


def test_sizes_are_dense_where_a_row_counts():
    sizes = bucket_sizes(5000)
    assert sizes[:12] == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80)
    assert sizes[-3:] == (896, 960, 1024)
    assert {128, 160, 512, 576} < set(sizes)
    assert len(sizes) == 35
    assert bucket_sizes(1) == (1,)
    assert bucket_sizes(3) == (1, 2, 3)
    assert bucket_sizes(100)[-2:] == (96, 100)


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_the_smallest_that_holds_it(most, rows):
    sizes = bucket_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == min(most, LARGEST)
    size = bucket_for(rows, sizes)
    if rows > sizes[-1]:
        assert size is None
    else:
        assert size in sizes
        assert size >= rows
        assert not any(rows <= other < size for other in sizes)


def test_no_sizes_hold_nothing():
    assert bucket_for(1, ()) is None


def test_graphs_are_made_in_order_with_progress():
    lines, made = [], []

    class Backend:
        def capture(self, run):
            run()
            return run

    replays = capture_all(Backend(), [20, 8, 4], lambda size: lambda: made.append(size), lines.append, "x")
    assert made == [20, 8, 4]
    assert list(replays) == [20, 8, 4]
    assert lines == ["recorded 3 of 3 graphs for x"]


def test_a_replay_computes_from_what_is_there_now():
    a, out, calls = torch.tensor([1.0, 2.0]), torch.zeros(2), []

    def run() -> None:
        calls.append(1)
        b = a * 2
        b[1:] += 1
        out.copy_(b)

    replay = TapeGraphs().capture(run)
    assert len(calls) == 2
    for values in ([1.0, 2.0], [5.0, -1.0]):
        a.copy_(torch.tensor(values))
        replay()
        assert out.tolist() == [2 * values[0], 2 * values[1] + 1]
    assert len(calls) == 2


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.sum().item(),
        lambda x: bool((x > 0).any()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda x: x[torch.tensor([0, 1])],
        lambda x: x.index_put_((x > 1,), torch.zeros(())),
    ],
)
def test_what_would_wait_is_refused(run):
    x = torch.ones(3)
    with pytest.raises(CannotCapture):
        TapeGraphs().capture(lambda: run(x))


def test_memory_that_moved_is_refused():
    x, out = torch.ones(3), torch.zeros(3)
    replay = TapeGraphs().capture(lambda: out.copy_(x * 2))
    replay()
    x.set_(torch.zeros(3))
    with pytest.raises(CannotCapture, match="moved"):
        replay()
