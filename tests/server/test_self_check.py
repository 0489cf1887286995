"""A draft model is tried on a text before it serves; the engine is as fresh afterwards as it was before."""

from __future__ import annotations

import logging

import pytest

from engine.speculation import Speculation
from scheduler.adaptive import LookAhead
from server.self_check import SUSPICIOUS, self_check
from tests.engine.harness import Engine, GuessDrafter, oracle, tiny

PROMPT = [3, 5, 7]


def text() -> list[int]:
    engine = Engine(tiny(), None, "off")
    engine.add("a", PROMPT, max_tokens=80, temperature=0.0, ignore_eos=True)
    engine.run()
    return PROMPT + engine.outputs["a"][0].tokens


@pytest.mark.parametrize("knows", [True, False])
def test_what_is_never_accepted_is_told_loudly(knows, caplog):
    drafter = oracle(text()) if knows else GuessDrafter(lambda tokens, slots: [(tokens[-1] + 7) % 60] * slots)
    speculation = Speculation(LookAhead(), 4)
    engine = Engine(tiny(), drafter, speculation)
    loop = engine.loop
    with caplog.at_level(logging.WARNING, "dspark"):
        tau = self_check(loop, engine.worker, PROMPT)
    assert bool(caplog.records) == (tau < SUSPICIOUS) == (not knows)
    assert tau > 4.5 if knows else tau < SUSPICIOUS
    assert loop.speculation is speculation
    assert engine.worker.drafter is drafter
    assert loop.pool.free_count == loop.pool.num_pages
    assert speculation.survival.mean("greedy")[0] == 0.5
    engine.check_idle()


def test_a_short_context_is_used_as_far_as_it_goes():
    engine = Engine(tiny(), oracle(text()), Speculation(LookAhead(), 4), max_model_len=20)
    assert self_check(engine.loop, engine.worker, PROMPT) > 3.0
    engine.check_idle()
