"""Measured once and kept; where that cannot be, measured each time, and said so."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import server.profiles
from engine.other_load import OtherLoad
from engine.torch_executor import TorchExecutor
from engine.worker import Worker
from scheduler.throughput import Throughput
from server.profiles import throughput
from tests.engine.full_disk import full_disk
from tests.engine.harness import VOCAB, one_thread, tiny  # noqa: F401


def measured(cache: Path, lines: list[str], fresh: bool = False) -> Throughput:
    worker = Worker(TorchExecutor(tiny(), 16, 4, torch.float64), None)
    return throughput(worker, {"model": "tiny"}, 0, 0, VOCAB, 8, 2, cache, lines.append, fresh)


def test_a_profile_is_measured_once(tmp_path):
    lines: list[str] = []
    first = measured(tmp_path, lines)
    assert measured(tmp_path, lines).to_dict() == first.to_dict()
    assert lines.count("measuring what steps cost") == 1
    measured(tmp_path, lines, fresh=True)
    assert lines.count("measuring what steps cost") == 2


@pytest.mark.parametrize("room", [0, 100])
def test_a_full_disk_costs_a_measurement_a_start(tmp_path, room):
    lines: list[str] = []
    with full_disk(room):
        measured(tmp_path, lines).check(8)
    said = f"the profile cannot be kept in {tmp_path}/profiles, every start will measure: File too large"
    assert lines[-1] == said
    assert not list((tmp_path / "profiles").iterdir())
    measured(tmp_path, lines)
    assert lines.count("measuring what steps cost") == 2
    (kept,) = (tmp_path / "profiles").iterdir()
    kept.write_text(json.dumps(json.loads(kept.read_text()))[:-20])  # cut short by someone else
    measured(tmp_path, lines)
    assert lines.count("measuring what steps cost") == 3


def test_a_busy_machine_is_told_at_every_start(tmp_path, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(server.profiles, "OtherLoad", lambda: type("Busy", (), {"share": lambda _: 0.43})())
    measured(tmp_path, lines)
    monkeypatch.undo()
    told = "other programs kept 43% of the processors busy while the profile was measured"
    assert [told in line for line in lines].count(True) == 1
    again: list[str] = []
    measured(tmp_path, again)
    assert len(again) == 1
    assert told in again[0]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_other_programs_are_counted():
    load, own = OtherLoad(), time.process_time()
    spin = "import time\nuntil = time.time() + 1\nwhile time.time() < until: pass"
    subprocess.run([sys.executable, "-c", spin], check=True)
    assert time.process_time() - own < 0.5
    assert load.share() > 0.5 / load.processors


def test_own_work_is_not_counted(monkeypatch):
    told = iter([(100.0, 500.0, 20.0), (110.0, 514.0, 28.0), (110.0, 501.0, 28.0)])  # clock, everybody's, own
    monkeypatch.setattr("engine.other_load._clocks", lambda: next(told))
    monkeypatch.setattr("engine.other_load._own_processors", lambda: {0, 1, 2})
    load = OtherLoad()
    assert load.share() == pytest.approx(0.6 / 3)
    assert load.share() == 0.0  # ticks came late
