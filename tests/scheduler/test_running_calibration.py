"""Predicted against observed acceptance in service: what it says, whatever is trimmed, what it corrects."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.calibration import sigmoid
from scheduler.running_calibration import RunningCalibration


def served(predicted: float, true: float, verify: int, rounds: int = 4000, running=None, seed: int = 0):
    """Blocks of 3 with this chance at every position, of which so many drafts are verified."""
    running = running or RunningCalibration(3)
    rng = np.random.default_rng(seed)
    for _ in range(rounds):
        accepted = min(int((rng.random(3) < true).cumprod().sum()), verify)
        running.observe([predicted] * 3, min(accepted + 1, verify), accepted)
    return running


@pytest.mark.parametrize("verify", [1, 2, 3])
def test_the_error_is_how_far_off_chances_are_however_much_is_trimmed(verify):
    assert served(0.6, 0.6, verify).error < 0.02
    assert served(0.8, 0.6, verify).error == pytest.approx(0.2, abs=0.025)


def test_little_says_nothing():
    running = RunningCalibration(3)
    assert running.error is None
    served(0.6, 0.6, 1, rounds=100, running=running)
    assert running.error is None
    running.observe([0.5] * 3, 0, 0)
    assert running.error is None


def test_what_is_long_ago_is_forgotten():
    running = served(0.9, 0.3, 3, rounds=20_000)
    served(0.6, 0.6, 3, rounds=60_000, running=running)
    assert running.error < 0.04


def test_the_correction_goes_where_chances_are_true():
    running, logit, rng = RunningCalibration(2), 1.5, np.random.default_rng(0)
    for _ in range(24_000):
        accepted = int((rng.random(2) < (0.6, 0.9)).cumprod().sum())
        running.observe(sigmoid(logit + np.array(running.shift)).tolist(), min(accepted + 1, 2), accepted)
    assert sigmoid(logit + np.array(running.shift)).tolist() == pytest.approx([0.6, 0.9], abs=0.03)
