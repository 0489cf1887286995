from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from loadtest.arrivals import OpenLoop, Timed, read_trace


@given(st.floats(0.5, 50), st.one_of(st.none(), st.floats(0.5, 50)), st.floats(1, 60), st.integers(0, 99))
def test_arrivals_lie_within_the_run_and_their_number_is_the_expected_one(
    rate: float, to: float | None, seconds: float, seed: int
) -> None:
    loop = OpenLoop(rate, to)
    times = loop.times(seconds, seed)
    assert times == sorted(times)
    assert len(times) == round(loop.expected(seconds))
    assert times == loop.times(seconds, seed)
    if times:
        assert 0.0 <= times[0] <= times[-1] <= seconds


def gaps(loop: OpenLoop, seconds: float = 2000.0) -> list[float]:
    times = loop.times(seconds, 7)
    return [later - earlier for earlier, later in itertools.pairwise(times)]


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (4.0, 0.5)])
def test_burstiness_is_the_variation_of_gaps(burstiness: float, variation: float) -> None:
    own = gaps(OpenLoop(5.0, None, burstiness))
    assert fmean(own) == pytest.approx(0.2, rel=1e-3)
    assert pstdev(own) / fmean(own) == pytest.approx(variation, rel=0.08)


def test_poisson_has_exponential_gaps_and_infinity_is_a_metronome() -> None:
    assert scipy_stats.kstest(gaps(OpenLoop(5.0)), "expon", args=(0, 0.2)).pvalue > 0.01
    assert OpenLoop(5.0, None, math.inf).times(10.0, 1)[:3] == pytest.approx([0.1, 0.3, 0.5])
    assert gaps(OpenLoop(5.0, None, math.inf), 10.0) == pytest.approx([0.2] * 49)


def test_a_ramp_moves_the_rate() -> None:
    times = OpenLoop(2.0, 18.0).times(400.0, 1)
    first, last = sum(time < 100 for time in times), sum(time >= 300 for time in times)
    assert first == pytest.approx(100 * 4.0, rel=0.15)
    assert last == pytest.approx(100 * 16.0, rel=0.1)


def test_traces(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 2500, "input_length": 30, "output_length": 4, "hash_ids": [1, 2]},
        {"at": 1.0, "prompt": "hi"},
    ]
    file.write_text("\n".join(json.dumps(line) for line in lines))
    assert read_trace(file) == [Timed(1.0, "hi"), Timed(2.5, None, 30, 4, (1, 2))]


@pytest.mark.parametrize(
    "line", ["{}", '{"at": 1}', '{"at": -1, "prompt": "x"}', "[1]", "no json", '{"at": "x"}']
)
def test_bad_traces_are_refused_by_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"at": 1, "prompt": "x"}\n' + line)
    with pytest.raises(ValueError, match=r"trace.jsonl:2"):
        read_trace(file)
