"""Accepted length, conditional acceptance and reliability against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from drafters.evaluation.rounds import (
    Recorder,
    Round,
    accepted_length,
    area_under_curve,
    conditional_acceptance,
    reliability,
)
from drafters.ngram import NgramDrafter
from tests.engine.harness import Engine, tiny


def test_accepted_length_pools_rounds_and_counts_the_bonus():
    rounds = [Round(3, 3, 4), Round(3, 0, 1), Round(3, 2, 2)]  # the last one ended at an accepted stop token
    assert accepted_length(rounds) == pytest.approx(7 / 3)
    assert math.isnan(accepted_length([]))


def test_conditional_acceptance_asks_only_blocks_that_got_there():
    rounds = [Round(3, 3, 4), Round(3, 1, 2), Round(3, 0, 1), Round(1, 1, 2), Round(2, 1, 2)]
    assert conditional_acceptance(rounds) == pytest.approx([4 / 5, 1 / 3, 1.0])
    assert conditional_acceptance([]) == []


def test_reliability_of_a_head_that_is_right_and_of_one_that_is_not():
    def block(chance: float, accepted: int) -> Round:
        logit = math.log(chance / (1 - chance))
        return Round(2, accepted, accepted + 1, (logit, 40.0))

    # Predicted .75: three of four survive both positions; the second is certain.
    first, second = reliability([block(0.75, 2)] * 3 + [block(0.75, 0)])
    assert first.ece == pytest.approx(0.0, abs=1e-9)
    assert second.ece == pytest.approx(0.0, abs=1e-9)
    assert math.isnan(first.auc) or first.auc == 0.5
    wrong, _ = reliability([block(0.975, 0)] * 2 + [block(0.025, 2)] * 2)
    assert wrong.ece == pytest.approx(0.975)
    assert wrong.auc == 0.0
    assert sorted(count for _, _, count in wrong.bins) == [2, 2]


def test_reliability_leaves_trimmed_blocks_out():
    assert reliability([Round(1, 1, 2, (0.0, 0.0)), Round(2, 0, 1, None)]) == []


def test_area_under_curve_counts_pairs():
    rng = np.random.default_rng(0)
    scores, labels = rng.integers(0, 5, 60) / 4, rng.random(60) < 0.4
    pairs = [1.0 if a > b else 0.5 if a == b else 0.0 for a in scores[labels] for b in scores[~labels]]
    assert area_under_curve(scores, labels) == pytest.approx(np.mean(pairs))


def test_the_recorder_sees_every_round_and_changes_nothing():
    def run(drafter):
        engine = Engine(tiny(), drafter, "fixed:3")
        for index in range(4):
            engine.add(str(index), [3 + index, 5, 7] * 4, max_tokens=30, temperature=0.0, ignore_eos=True)
        engine.run()
        return engine.texts()

    recorder = Recorder(NgramDrafter(1, 3))
    texts = run(recorder)
    assert texts == run(NgramDrafter(1, 3))
    # All but each text's first token, which comes from its prefill, were emitted in rounds.
    assert sum(each.emitted for each in recorder.rounds) == sum(len(text) for (text,) in texts.values()) - 4
    assert all(each.accepted <= each.verified for each in recorder.rounds)
