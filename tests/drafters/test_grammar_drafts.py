"""Real drafters draw under a request's grammar, slot by slot, and what is emitted keeps the masked law."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from engine.native.loader import supported
from engine.params import SamplingParams
from tests.drafters.test_exactness import CASES, GAMMA, VOCAB, Drafted, drafter_of
from tests.engine.enumerate import Enumeration, Text, total_variation
from tests.engine.test_grammar import LANGUAGES, GrammarWorld


@dataclass
class GrammarDrafted(GrammarWorld, Drafted):
    """A world with a language, whose drafts are a real drafter's."""

    def q(self, prefix: Text) -> list[float]:
        return Drafted.q(self, prefix)


#: each takes half a minute
SOME_AND_THE_REST = [
    pytest.param(
        kind,
        where,
        id=f"{kind}-{where}",
        marks=[] if (kind, where) == ("markov", "native") else pytest.mark.long,
    )
    for kind, where in CASES
]


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize(("kind", "where"), SOME_AND_THE_REST)
def test_drafts_keep_to_the_grammar_and_the_text_to_its_law(kind, where, reduced, tmp_path):
    if where == "native" and not supported():
        pytest.skip("the kernels were not built")
    world = GrammarDrafted(
        SamplingParams(presence_penalty=0.5, top_p=0.9),
        vocab=VOCAB,
        gamma=GAMMA,
        seed=2,
        language=LANGUAGES["open"],
        drafter=drafter_of(kind, where, reduced, tmp_path),
    )
    drafts = list(world.drafts())
    assert sum(weight for _, weight in drafts) == pytest.approx(1.0, abs=1e-9)
    ids = world.d2t or tuple(range(VOCAB))
    for block, _ in drafts:
        for k, token in enumerate(block.tokens):
            prefix = block.tokens[:k]
            if world.ended(prefix):
                break
            allowed = world.allowed(prefix)
            if any(allowed[each] for each in ids):
                assert allowed[token], "a draft that the drafter knew to be in vain"
    target = world.target_law(GAMMA + 1)
    for length in range(len(drafts[0][0]) + 1):
        laws = Enumeration(world).emitted([(block, length) for block, _ in drafts])
        law = world.mixture(laws, [weight for _, weight in drafts], GAMMA + 1)
        assert total_variation(law, target) < 1e-6
