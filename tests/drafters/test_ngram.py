"""Prompt lookup proposes what followed the last occurrence of the longest tail that occurred before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from drafters.ngram import NgramDrafter
from engine.drafter import DraftRequest
from engine.params import SamplingParams
from engine.sampling import SamplingState


def request(tokens: Sequence[int], slots: int) -> DraftRequest:
    state = SamplingState(SamplingParams(), 100, frozenset())
    return DraftRequest(0, np.asarray(tokens, dtype=np.int32), slots, 0, np.zeros(1, dtype=np.int32), state)


def propose(drafter: NgramDrafter, tokens: Sequence[int], slots: int) -> tuple[int, ...] | None:
    (block,) = drafter.draft([request(tokens, slots)])
    if block is None:
        return None
    assert block.q is None, "the proposal is deterministic"
    assert block.d2t is None
    assert block.confidence is None
    return block.tokens


def brute_force(
    tokens: Sequence[int], slots: int, min_n: int, max_n: int, window: int = 8192
) -> tuple[int, ...] | None:
    """Every length from the longest, every place from the latest."""
    tokens = list(tokens)[-window:]
    for n in range(max_n, min_n - 1, -1):
        if n >= len(tokens):
            continue
        tail = tokens[-n:]
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tail:
                return tuple(tokens[start + n : start + n + slots])
    return None


@settings(max_examples=600, deadline=None, derandomize=True)
@given(
    st.integers(1, 4).flatmap(lambda high: st.lists(st.integers(0, high), min_size=1, max_size=60)),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(0, 4),
    st.one_of(st.just(8192), st.integers(1, 30)),
)
@example([1, 1, 1, 1], 3, 2, 2, 8192)
@example([1, 2, 3, 1, 2], 8, 1, 1, 8192)
@example([0, 1, 0], 5, 2, 2, 8192)
def test_proposals_equal_a_brute_force_search(
    tokens: list[int], slots: int, min_n: int, more: int, window: int
) -> None:
    drafter = NgramDrafter(min_n, min_n + more, window)
    assert propose(drafter, tokens, slots) == brute_force(tokens, slots, min_n, min_n + more, window)


def test_long_texts_equal_a_brute_force_search() -> None:
    rng = np.random.default_rng(0)
    found = 0
    for _ in range(60):
        tokens = rng.integers(0, 12, 700).tolist()
        for min_n, max_n in ((2, 4), (3, 3), (1, 8), (4, 6)):
            expected = brute_force(tokens, 6, min_n, max_n)
            assert propose(NgramDrafter(min_n, max_n), tokens, 6) == expected
            found += expected is not None
    assert 100 < found < 200  # both answers occur


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([5, 1, 2, 3, 9, 1, 2, 4, 9, 1, 2], (4, 9, 1)),  # the latest of two
        ([7, 1, 2, 3, 9, 8, 1, 2, 4, 9, 7, 1, 2], (3, 9, 8)),  # the longer of two, though earlier
        ([1, 2, 1, 2], (1, 2)),  # not more than there is
        ([1, 1, 1], (1,)),  # the occurrence may overlap the tail
        ([1, 2, 3, 4], None),
        ([3, 4, 2, 4], None),  # one token is too short a tail
    ],
)
def test_examples(tokens: list[int], expected: tuple[int, ...] | None) -> None:
    assert propose(NgramDrafter(), tokens, 3) == expected


def test_slots_cap_the_block() -> None:
    tokens = [*range(20), 0, 1]
    for slots in range(1, 30):
        block = propose(NgramDrafter(), tokens, slots)
        assert block == tuple([*range(2, 20), 0, 1][:slots])


@pytest.mark.parametrize("tokens", [[1], [1, 1], [1, 2]])
def test_short_texts_have_nothing_to_look_up(tokens: list[int]) -> None:
    assert propose(NgramDrafter(), tokens, 4) is None


def test_a_text_of_one_repeated_token_is_long_enough_at_three() -> None:
    assert propose(NgramDrafter(1, 4), [1, 1], 4) == (1,)
    assert propose(NgramDrafter(1, 4), [1], 4) is None


def test_only_the_window_is_searched() -> None:
    tokens = [1, 2, 3, *([0] * 20), 1, 2]
    assert propose(NgramDrafter(window=25), tokens, 1) == (3,)
    assert propose(NgramDrafter(window=24), tokens, 1) is None


def test_requests_are_answered_in_order_and_alone() -> None:
    texts = [[1, 2, 3, 1, 2], [4, 5], [6, 7, 8, 6, 7], [1, 2, 9, 1, 2]]
    drafter = NgramDrafter()
    blocks = drafter.draft([request(text, 2) for text in texts])
    assert [block and block.tokens for block in blocks] == [(3, 1), None, (8, 6), (9, 1)]
    assert drafter.draft([]) == []


def test_tokens_of_a_block_are_plain_integers() -> None:
    """They travel to JSON and into tuples that are compared."""
    block = propose(NgramDrafter(), [1, 2, 3, 1, 2], 3)
    assert block is not None
    assert all(type(token) is int for token in block)


def test_the_text_is_not_written_to() -> None:
    tokens = np.array([1, 2, 3, 1, 2], dtype=np.int32)
    tokens.flags.writeable = False
    (block,) = NgramDrafter().draft([request(tokens, 3)])
    assert block is not None
    assert tokens.tolist() == [1, 2, 3, 1, 2]


@pytest.mark.parametrize(("min_n", "max_n"), [(0, 3), (3, 2), (-1, 4)])
def test_impossible_lengths_are_refused(min_n: int, max_n: int) -> None:
    with pytest.raises(ValueError, match="prompt_lookup_min"):
        NgramDrafter(min_n, max_n)


def test_it_asks_for_no_features() -> None:
    drafter = NgramDrafter()
    assert drafter.name == "ngram"
    assert drafter.feature_layers == ()
    assert drafter.identity == ""
