"""Measured once and kept; where that cannot be, measured each time, and said so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

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
