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
    for _ in range(rounds // 4):
        accepted = (rng.random((4, 3)) < true).cumprod(axis=1).sum(axis=1)
        accepted = np.minimum(accepted, verify)
        tried = np.arange(3) < np.minimum(accepted + 1, verify)[:, None]
        running.observe(np.full((4, 3), predicted), tried, np.arange(3) < accepted[:, None])
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
    running.observe(np.zeros((0, 3)), np.zeros((0, 3), bool), np.zeros((0, 3), bool))


def test_what_is_long_ago_is_forgotten():
    running = served(0.9, 0.3, 3, rounds=20_000)
    served(0.6, 0.6, 3, rounds=60_000, running=running)
    assert running.error < 0.04


def test_the_correction_goes_where_chances_are_true():
    running, logit, rng = RunningCalibration(2), 1.5, np.random.default_rng(0)
    for _ in range(6000):
        chances = np.tile(sigmoid(logit + running.shift), (4, 1))
        hits = rng.random((4, 2)) < (0.6, 0.9)
        accepted = hits.cumprod(axis=1).sum(axis=1)
        tried = np.arange(2) < np.minimum(accepted + 1, 2)[:, None]
        running.observe(chances, tried, np.arange(2) < accepted[:, None])
    assert sigmoid(logit + running.shift).tolist() == pytest.approx([0.6, 0.9], abs=0.03)
