"""`dspark profile` and `dspark bench` on the default model, with prompt lookup."""

from __future__ import annotations

import json

import pytest

from scheduler.throughput import Throughput
from server.bench import main as bench
from server.costs import main as profile
from tests.engine import real

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture
def flags(tmp_path) -> list[str]:
    small = "--threads 1 --num-pages 200 --max-num-batched-tokens 40 --max-num-seqs 4"
    lookup = ["-sc", '{"method": "ngram"}', "--cache-dir", str(tmp_path / "cache")]
    return [str(real.folder()), *small.split(), *lookup]


def test_a_profile_is_printed_kept_and_measured_again_on_request(flags, tmp_path, capsys):
    file = tmp_path / "profile.json"
    arguments = [*flags, "--json", str(file)]
    assert profile([*arguments, "--png", str(tmp_path / "profile.png")]) == 0
    first = json.loads(file.read_text())["throughput"]
    assert Throughput.from_dict(first).verify.sizes[-1] == 40
    assert "rows verified" in capsys.readouterr().out
    assert (tmp_path / "profile.png").stat().st_size > 1000
    assert profile(arguments) == 0
    assert json.loads(file.read_text())["throughput"] == first
    assert profile([*arguments, "--fresh"]) == 0
    assert json.loads(file.read_text())["throughput"] != first


def test_a_benchmark_says_what_was_foreseen_and_leaves_a_trace(flags, tmp_path):
    results, trace = tmp_path / "bench.json", tmp_path / "trace.json"
    short = ["--concurrency", "2", "--requests", "1", "--max-tokens", "12", "--policies", "off", "lookahead"]
    assert bench([*flags, *short, "--json", str(results), "--trace", str(trace)]) == 0
    off, ours = json.loads(results.read_text())["rows"]
    assert (off["policy"], ours["policy"]) == ("off", "lookahead")
    assert off["tokens"] == ours["tokens"] == 24
    assert ours["forecast_error"] > 0
    assert 0 <= ours["wait_ms"] < 1e3
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == 5 * (off["steps"] + ours["steps"])
    assert min(span["dur"] for span in spans) >= 0
