"""Sequential temperature scaling on rounds whose truth is known; the estimator without confidences."""

from __future__ import annotations

import numpy as np
import pytest

from scheduler.calibration import Acceptance, Calibration, errors, expected_calibration_error, fit, sigmoid


def rounds(count: int, heats: list[float], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits that are `heats` times too large, and what really was accepted."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(0.8, 1.2, (count, len(heats)))
    survived = np.cumprod(rng.random(truth.shape) < sigmoid(truth), axis=1)
    return truth * heats, survived.sum(1)


def test_a_logit_is_divided_by_its_temperature():
    found = [float(Calibration("greedy", (heat,)).apply(np.array([2.0]))[0]) for heat in (0.5, 1.0, 2.0)]
    assert found == pytest.approx([0.982, 0.881, 0.731], abs=5e-4)


def test_what_was_too_sure_is_found_out_position_by_position():
    heats = [2.0, 3.0, 0.5]
    table = fit("rejection", *rounds(40_000, heats))
    assert table.temperatures == pytest.approx(heats, rel=0.15)
    assert max(table.ece_after) < 0.01 < 0.03 < max(table.ece_before)
    held_out, accepted = rounds(40_000, heats, seed=1)
    assert max(errors(table, held_out, accepted)) < 0.012
    assert max(table.ece_noise) < 0.01


def test_a_shift_mends_what_temperatures_cannot():
    rng = np.random.default_rng(0)
    truth = rng.normal(0.0, 0.5, (40_000, 2))
    accepted = np.cumprod(rng.random(truth.shape) < sigmoid(truth), axis=1).sum(1)
    table = fit("greedy", 2.0 * (truth - 0.6), accepted)  # mean chances 0.42 where they are 0.5
    assert table.shifts == pytest.approx((0.6, 0.6), abs=0.06)
    assert table.temperatures == pytest.approx((2.0, 2.0), rel=0.15)
    assert max(table.ece_after) < 0.01 < 0.04 < table.ece_temperatures[0] < table.ece_before[0]


def test_noise_is_what_a_sample_cannot_help():
    few, many = (fit("greedy", *rounds(count, [1.0]), rounds(count, [1.0], 1)) for count in (500, 40_000))
    assert few.ece_noise[0] == pytest.approx(few.ece_after[0], rel=0.7)
    assert few.ece_noise[0] > 4 * many.ece_noise[0]


def test_calibrated_confidences_stay_as_they_are():
    table = fit("greedy", *rounds(40_000, [1.0, 1.0]))
    assert table.temperatures == pytest.approx((1.0, 1.0), rel=0.13)  # the grid's step is 12 %


def test_error_by_hand():
    predicted = np.array([0.1, 0.1, 0.9, 0.9])
    survived = np.array([False, True, True, True])
    assert expected_calibration_error(predicted, survived) == pytest.approx((0.8 + 0.2) / 4)


def test_a_table_comes_back_from_a_file():
    table = fit("coupled", *rounds(500, [1.5, 2.0]))
    assert Calibration.from_dict(table.to_dict()) == table
    with pytest.raises(ValueError, match="no calibration"):
        Calibration.from_dict({"heat": 3})
    with pytest.raises(ValueError, match="shift for each"):
        Calibration.from_dict({"regime": "greedy", "temperatures": [1.0, 1.0], "shifts": [0.1]})
    for raw in ([], {"regime": "slow", "temperatures": [1.0]}, {"regime": "greedy", "temperatures": ["x"]}):
        with pytest.raises(ValueError, match="calibration"):
            Calibration.from_dict(raw)
    with pytest.raises(ValueError, match="numbers"):
        Calibration.from_dict({"regime": "greedy", "temperatures": [1.0], "shifts": [float("nan")]})
    with pytest.raises(ValueError, match="positive"):
        Calibration.from_dict({"regime": "greedy", "temperatures": [1.0, 0.0]})


def test_a_short_table_speaks_for_its_positions_only():
    assert Calibration("greedy", (1.0, 1.0)).apply(np.full((4, 3), 0.5)).shape == (4, 2)


def test_acceptance_is_learnt_from_what_was_tried():
    rng = np.random.default_rng(0)
    truth, estimate = np.array([0.9, 0.5, 0.7]), Acceptance(3)
    for _ in range(4000):
        verified = int(rng.integers(4))
        hits = rng.random(3) < truth
        accepted = int(np.cumprod(hits)[:verified].sum())
        estimate.observe(min(accepted + 1, verified), accepted)
    assert estimate.chances(3) == pytest.approx(truth, abs=0.12)


def test_an_unseen_position_leans_on_the_one_before():
    estimate = Acceptance(4, prior=0.6)
    assert estimate.chances(4) == pytest.approx([0.6] * 4)
    for _ in range(300):
        estimate.observe(1, 1)
    chances = estimate.chances(6)
    assert min(chances) > 0.95
    assert len(chances) == 6
