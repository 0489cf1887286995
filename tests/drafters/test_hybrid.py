"""Which of two drafters is asked, and that nothing but earlier rounds decides it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from drafters.hybrid import HybridDrafter, gain
from drafters.ngram import NgramDrafter
from engine.batch import DraftBlock, Verdict, VerificationBatch
from engine.drafter import DraftRequest
from engine.params import SamplingParams
from engine.sampling import SamplingState
from tests.engine.harness import VOCAB, Engine, babbler, tiny
from tests.engine.test_forward import item


class Model:
    """A draft model that always proposes 50, 51, ..."""

    name, feature_layers, identity = "model", (3,), "weights"
    gamma = 7

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.observed = 0

    def observe(self, batch, features, verdicts) -> None:
        self.observed += 1

    def draft(self, requests):
        self.asked += [request.sequence for request in requests]
        return [DraftBlock(tuple(range(50, 50 + request.slots))) for request in requests]


LOOKED_UP, MODELLED = (7, 8, 9), (50, 51, 52)
REPEATS, PLAIN = [4, 5, 6, 7, 8, 9, 4, 5, 6], [10, 11, 12, 13, 14]


def request(tokens: list[int], sequence: int = 0, slots: int = 3) -> DraftRequest:
    state = SamplingState(SamplingParams(), VOCAB, frozenset())
    return DraftRequest(sequence, np.array(tokens), slots, 1, np.arange(4, dtype=np.int32), state)


def verified(hybrid: HybridDrafter, block: DraftBlock, accepted: int, sequence: int = 0) -> None:
    """The whole block was."""
    one = item([1, 2], 1, 1 + len(block), [0], draft=list(block.tokens))
    one = replace(one, sequence=sequence, draft=block)
    hybrid.observe(VerificationBatch((one,)), None, [Verdict((1,) * (accepted + 1), accepted)])


def test_the_lookup_is_used_where_it_holds_and_dropped_where_it_does_not():
    model = Model()
    hybrid = HybridDrafter(NgramDrafter(2, 4), model)
    assert (hybrid.feature_layers, hybrid.identity) == ((3,), "weights")
    (block,) = hybrid.draft([request(REPEATS)])
    assert block.tokens == LOOKED_UP
    assert model.asked == []
    for good in (MODELLED, LOOKED_UP, MODELLED):  # the world changes, and changes back
        for _ in range(20):
            verified(hybrid, block, 3 if block.tokens == good else 0)
            (block,) = hybrid.draft([request(REPEATS)])
        assert block.tokens == good
    assert model.observed == 60


def test_sequences_are_judged_apart_and_the_model_steps_in_where_nothing_repeats():
    model = Model()
    hybrid = HybridDrafter(NgramDrafter(2, 4), model)
    for _ in range(12):
        blocks = hybrid.draft([request(REPEATS, 1), request(REPEATS, 2)])
        for sequence, block, good in zip((1, 2), blocks, (MODELLED, LOOKED_UP), strict=True):
            verified(hybrid, block, 3 if block.tokens == good else 0, sequence)
    blocks = hybrid.draft([request(REPEATS, 1), request(REPEATS, 2), request(PLAIN, 3)])
    assert [block.tokens for block in blocks] == [MODELLED, LOOKED_UP, MODELLED]


def test_where_the_model_may_not_draft_only_lookups_are_proposed_and_may_be_longer():
    model = Model()
    hybrid = HybridDrafter(NgramDrafter(2, 4), model)
    wanted = [replace(request(text, n, 0), lookup_slots=2) for n, text in enumerate((REPEATS, PLAIN))]
    blocks = hybrid.draft(wanted)
    assert blocks[0].tokens == LOOKED_UP[:2]
    assert blocks[1] is None
    assert model.asked == []


def test_the_choice_is_the_same_whatever_the_model_would_draw():
    class Other(Model):
        def draft(self, requests):
            self.asked += [request.sequence for request in requests]
            return [None for _ in requests]

    rng = np.random.default_rng(0)
    hybrids = [HybridDrafter(NgramDrafter(2, 4), kind()) for kind in (Model, Other)]
    for _ in range(60):
        text = REPEATS if rng.random() < 0.8 else PLAIN
        for hybrid in hybrids:
            hybrid.draft([request(text)])
        assert hybrids[0].model.asked == hybrids[1].model.asked
        accepted = int(rng.integers(4))
        for hybrid in hybrids:
            verified(hybrid, DraftBlock((7, 8, 9), chances=(0.5,) * 3), accepted)
    assert 0 < len(hybrids[0].model.asked) < 60


def test_a_model_is_credited_with_no_more_than_it_drafts():
    for gamma, asked in ((1, []), (7, [0])):
        model = Model()
        model.gamma = gamma
        hybrid = HybridDrafter(NgramDrafter(2, 4), model)
        for sequence in range(1, 60):  # of the model two tokens in three, of lookups one in two
            hybrid.draft([request(PLAIN, sequence)])
            verified(hybrid, DraftBlock(MODELLED), 2, sequence)
        model.asked.clear()
        hybrid.draft([request(REPEATS, 0)])
        assert model.asked == asked


def test_records_do_not_pile_up():
    hybrid = HybridDrafter(NgramDrafter(2, 4), Model())
    for sequence in range(5000):
        hybrid.draft([request(PLAIN, sequence)])
    assert len(hybrid._records) == 4096


def test_texts_do_not_depend_on_it():
    model = tiny()

    def texts(policy: str):
        drafter = HybridDrafter(NgramDrafter(1, 3), babbler(3)) if policy != "off" else None
        engine = Engine(model, drafter, policy)
        for index in range(8):
            how = {"seed": index} if index % 2 else {"temperature": 0.0}
            engine.add(str(index), [3 + index, 5, 7] * 3, max_tokens=40, ignore_eos=True, **how)
        engine.run()
        return engine.texts()

    assert texts("fixed:4") == texts("off")


@pytest.mark.parametrize(("chance", "length", "wanted"), [(0.5, 2, 0.75), (1.0, 4, 4.0), (0.0, 3, 0.0)])
def test_gain_is_the_sum_of_survivals(chance, length, wanted):
    assert gain(chance, length) == wanted
