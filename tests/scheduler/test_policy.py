"""The fixed verification policy, and how policies are named."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.adaptive import Threshold
from scheduler.policies import parse_policy
from scheduler.policy import Choice, Drafted, Fixed

BLOCKS = st.lists(st.integers(0, 8).map(Drafted), max_size=8)


@given(BLOCKS, st.integers(0, 8), st.integers(0, 40))
@settings(max_examples=200, deadline=None)
def test_rows_are_given_out_position_by_position_across_the_blocks(blocks, k, cap):
    rows = [
        (position, i) for position in range(k) for i, block in enumerate(blocks) if position < block.length
    ][:cap]
    lengths = Fixed(k).select(Choice.of(blocks, len(blocks), cap))
    assert lengths == [sum(at == i for _, at in rows) for i in range(len(blocks))]
    assert sum(lengths) <= cap


@given(BLOCKS, st.integers(0, 8), st.integers(0, 40), st.data())
@settings(max_examples=200, deadline=None)
def test_lengths_look_at_nothing_that_was_drafted(blocks, k, cap, data):
    survivals = st.floats(0, 1) | st.just(math.nan)
    seen = [
        Drafted(
            block.length,
            tuple(data.draw(st.lists(survivals, min_size=block.length, max_size=block.length))),
            guarded=data.draw(st.booleans()),
        )
        for block in blocks
    ]
    assert Fixed(k).select(Choice.of(seen, 1, cap)) == Fixed(k).select(Choice.of(blocks, 1, cap))


def test_every_block_is_verified_up_to_k():
    assert Fixed(3).select(Choice.of([Drafted(5), Drafted(0), Drafted(2)], 3, 100)) == [3, 0, 2]
    assert Fixed(3).select(Choice.of([], 0, 100)) == []


def test_names_and_slots():
    assert (parse_policy("off").slots(), parse_policy("off").name) == (0, "off")
    assert (parse_policy("fixed:5").slots(), parse_policy("fixed:5").name) == (5, "fixed:5")
    assert (parse_policy("fixed:0").slots(), parse_policy("fixed:0").name) == (0, "off")
    assert parse_policy("fixed:64").slots() == 64
    for name in ("lookahead", "lagged", "algorithm1", "threshold"):
        assert (parse_policy(name).name, parse_policy(name).slots()) == (name, None)


@pytest.mark.parametrize(
    "text", ["", "fixed", "fixed:", "fixed:-1", "fixed:x", "fixed:1.5", "fixed:65", "Off", "on", "off:3"]
)
def test_other_names_are_refused_and_the_message_says_what_is_allowed(text):
    with pytest.raises(ValueError, match="fixed:K") as caught:
        parse_policy(text)
    assert repr(text) in str(caught.value)


def test_a_thresholds_options():
    assert parse_policy("threshold") == Threshold()
    for text, wanted in (
        ("threshold:base=0.4,max=5", Threshold(base=0.4, most=5)),
        ("threshold:sensitivity=0,min=1", Threshold(sensitivity=0.0, least=1)),
    ):
        assert parse_policy(text) == replace(wanted, name=text)
    for wrong in ("threshold:", "threshold:base", "threshold:depth=3", "threshold:min=1.5"):
        with pytest.raises(ValueError, match="is no option of"):
            parse_policy(wrong)
    with pytest.raises(ValueError, match="min <= max"):
        parse_policy("threshold:min=3,max=2")


def test_a_threshold_keeps_within_its_bounds_and_the_rows():
    chances = [(0.9, 0.9, 0.2, 0.9), (0.1,), (), (0.6, 0.6)]
    blocks = [Drafted(len(row), row) for row in chances]

    def lengths(policy: Threshold, cap: int = 99, load: float = 0.0) -> list[int]:
        return policy.select(Choice.of(blocks, 4, cap, load=load))

    assert lengths(Threshold()) == [2, 0, 0, 2]
    assert lengths(Threshold(), load=0.5) == [2, 0, 0, 0]  # 0.65
    assert lengths(Threshold(least=1)) == [2, 1, 0, 2]
    assert lengths(Threshold(base=0.0, most=3)) == [3, 1, 0, 2]
    assert lengths(Threshold(base=0.0), cap=4) == [4, 0, 0, 0]
    assert lengths(Threshold(base=0.0), cap=6) == [4, 1, 0, 1]


def test_k_must_not_be_negative():
    with pytest.raises(ValueError, match="K >= 0"):
        Fixed(-1)
