"""What an output says about the steps that made it: which tokens were drafts, and how many were verified."""

from __future__ import annotations

from typing import Any

import pytest

from engine.outputs import OutputDelta
from tests.engine.harness import Engine, babbler, one_thread, oracle, tiny  # noqa: F401

PROMPT = [3, 14, 15, 9, 26]


def rounds(engine: Engine, **params: Any) -> tuple[list[OutputDelta], Any]:
    """All deltas of one request, and its figures."""
    deltas: list[OutputDelta] = []
    active = engine.add("r", PROMPT, **params)
    while engine.loop.has_work:
        batch = engine.loop.begin()
        assert batch is not None
        deltas += [delta for _, delta in engine.loop.commit(batch, engine.worker.run(batch))]
    return deltas, active


@pytest.mark.parametrize("seed", range(4))
def test_rounds_add_up_to_the_tokens_and_to_the_request(seed: int) -> None:
    engine = Engine(tiny(), babbler(seed), "fixed:4")
    deltas, active = rounds(engine, max_tokens=40, ignore_eos=True, seed=seed)
    for delta in deltas:
        assert sum(made.tokens for made in delta.rounds) == len(delta.token_ids)
        for made in delta.rounds:
            assert made.accepted <= made.verified
            assert made.accepted <= made.tokens <= made.accepted + 1
    all_rounds = [made for delta in deltas for made in delta.rounds]
    assert sum(made.tokens for made in all_rounds) == active.usage.completion_tokens == 40
    assert sum(made.verified for made in all_rounds) == active.usage.draft_tokens > 0
    assert sum(made.accepted for made in all_rounds) == active.usage.accepted_tokens


def test_what_was_known_beforehand_is_all_drafts_and_bonus_tokens() -> None:
    plain, _ = rounds(Engine(tiny()), max_tokens=13, ignore_eos=True, temperature=0.0)
    text = [token for delta in plain for token in delta.token_ids]
    assert all((made.verified, made.accepted, made.tokens) == (0, 0, 1) for d in plain for made in d.rounds)
    engine = Engine(tiny(), oracle([*PROMPT, *text]), "fixed:3")
    known, _ = rounds(engine, max_tokens=13, ignore_eos=True, temperature=0.0)
    assert [token for delta in known for token in delta.token_ids] == text
    shapes = [(made.verified, made.accepted, made.tokens) for delta in known for made in delta.rounds]
    assert shapes == [(0, 0, 1), (3, 3, 4), (3, 3, 4), (3, 3, 4)]
