"""DSpark in the engine's loop.

Texts stay the target's, context follows verification, q is what was drawn from.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from drafters.blocks import TorchDraftBlocks
from drafters.checkpoint import save
from drafters.dspark import DSparkDrafter
from drafters.model import DraftModel
from drafters.native_blocks import NativeDraftBlocks
from drafters.slots import SlotDraw
from engine.batch import Verdict, VerificationBatch
from engine.drafter import DraftRequest
from engine.models.decoder import FusedDecoder
from engine.native.draft import Span
from engine.native.loader import supported
from engine.native.weights import as_bf16
from engine.native_executor import NativeExecutor
from engine.params import SamplingParams
from engine.sampling import SamplingState
from engine.torch_executor import TorchExecutor
from tests.drafters.test_draft_model import model_of
from tests.engine.harness import VOCAB, Engine
from tests.engine.test_forward import item
from tests.engine.test_native_draft import World, rows

pytestmark = pytest.mark.skipif(not supported(), reason="the kernels were not built")

PAGES = 60


class Pair:
    """One draft model over one target, on the kernels and in torch."""

    def __init__(self, folder, kind: str = "markov", reduced: bool = False) -> None:
        self.world = World(kind, reduced)
        if reduced:  # the rows of the target's head, as a checkpoint without a head of its own means them
            self.world.head = self.world.target_tensors["lm_head.weight"][self.world.ids]
        self.model = model_of(self.world, 16)
        save(self.model, folder)
        config, tensors = self.world.target_config, self.world.target_tensors
        self.native_target = NativeExecutor(config, as_bf16(tensors.items()), PAGES, 2, 512)
        head = rows(tensors["lm_head.weight"])
        self.native = NativeDraftBlocks(folder, self.native_target, head, 512)
        self.decoder = FusedDecoder(config, tensors.items(), torch.float32)
        self.torch_target = TorchExecutor(self.decoder, PAGES, 16)
        self.torch = TorchDraftBlocks(self.model, PAGES, 16)

    def drafter(self, where: str) -> DSparkDrafter:
        blocks = self.native if where == "native" else self.torch
        return DSparkDrafter(self.model.config, blocks, 16, "tiny", self.model.d2t)

    def engine(
        self, where: str, policy: str, drafter: DSparkDrafter | None = None, pages: int = PAGES
    ) -> Engine:
        if policy != "off":
            drafter = drafter or self.drafter(where)
        executor = self.native_target if where == "native" else self.torch_target
        return Engine(self.decoder, drafter, policy, num_pages=pages, page_size=16, wrap=lambda _: executor)


def draws(count: int, **params) -> list[SlotDraw]:
    return [SlotDraw(SamplingParams(**params), u=0.15 + 0.2 * k) for k in range(count)]


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("kind", ["markov", "gated", "rnn"])
def test_kernels_and_torch_draw_from_the_same_laws(tmp_path, kind, reduced):
    pair = Pair(tmp_path, kind, reduced)
    features = torch.randn(30, 3 * 64)
    pages = np.array([7, 3], dtype=np.int32)
    spans = [Span(20, 5, pages), Span(5, 3, pages + 10)]
    # Hot, because this random model is very sure of itself, and certainty magnifies rounding.
    hows = [draws(5, temperature=9.0), draws(3, temperature=12.0, min_p=1e-4)]
    found = []
    for blocks in (pair.native, pair.torch):
        blocks.write_context([Span(0, 20, pages), Span(0, 5, pages + 10)], features[:25])
        found.append(blocks.draft(spans, [4, 8], hows))
    for ours, wanted in zip(*found, strict=True):
        same = next(
            (k for k, (a, b) in enumerate(zip(ours.tokens, wanted.tokens, strict=True)) if a != b),
            len(ours.tokens) - 1,
        )
        # Up to where the draws part, if rounding makes them part, laws and confidences agree.
        assert (ours.laws[: same + 1] - wanted.laws[: same + 1]).abs().sum(-1).max() < 0.1
        assert ours.confidence[: same + 1] == pytest.approx(wanted.confidence[: same + 1], rel=0.03, abs=0.3)


def test_in_dflashs_own_layout_the_masks_predict(tmp_path):
    """Slot j of the same block, for the token in its place: on the kernels, in torch and in training."""
    pair = Pair(tmp_path)
    pages, features = np.array([7, 3], dtype=np.int32), torch.randn(20, 3 * 64)
    span, how = Span(20, 4, pages), draws(4, temperature=9.0)
    pair.torch.write_context([Span(0, 20, pages)], features)
    with torch.no_grad():
        hidden = pair.model(features, torch.tensor([20]), pair.model.slots(torch.tensor([4]), 5))[0, 1:]
        wanted = torch.softmax((hidden[0] @ pair.model.head.T + bias_after(pair.model, 4)) / 9.0, -1)
    pair.model.config = replace(pair.model.config, sample_from_anchor=False)
    save(pair.model, tmp_path)
    head = rows(pair.world.target_tensors["lm_head.weight"])
    native = NativeDraftBlocks(tmp_path, pair.native_target, head, 512)
    assert (native.config.sample_from_anchor, native.config.gamma) == (False, 4)
    native.write_context([Span(0, 20, pages)], features)
    for blocks in (pair.torch, native):
        (drawn,) = blocks.draft([span], [4], [how])
        assert len(drawn.tokens) == 4
        assert (drawn.laws[0] - wanted).abs().sum() < 0.1


def test_a_confidence_head_needs_no_markov_head(tmp_path):
    pair = Pair(tmp_path)
    config = replace(pair.model.config, head="none", rank=0, confidence_with_markov=False)
    model = DraftModel(config, pair.model.embedding, pair.model.head).eval()
    kept = {name: value for name, value in pair.model.state_dict().items() if "_head" not in name}
    model.load_state_dict(kept, strict=False)
    torch.nn.init.normal_(model.confidence_head.proj.weight)
    save(model, tmp_path)
    native = NativeDraftBlocks(
        tmp_path, pair.native_target, rows(pair.world.target_tensors["lm_head.weight"]), 512
    )
    pages, features = np.array([7, 3], dtype=np.int32), torch.randn(20, 3 * 64)
    found = []
    for blocks in (TorchDraftBlocks(model, PAGES, 16), native):
        blocks.write_context([Span(0, 20, pages)], features)
        found.append(blocks.draft([Span(20, 4, pages)], [4], [draws(4, temperature=9.0)])[0].confidence)
    assert found[0] == pytest.approx(found[1], rel=0.05, abs=0.3)
    assert max(map(abs, found[1])) > 0.3


def bias_after(model, token: int) -> torch.Tensor:
    return model.markov_head.markov_w2(model.markov_head.markov_w1(torch.tensor(token)))


@pytest.mark.parametrize("kind", ["markov", "gated", "rnn"])
def test_small_weights_draw_from_nearly_the_same_laws(tmp_path, kind):
    pair = Pair(tmp_path, kind, reduced=True)
    head = rows(pair.world.target_tensors["lm_head.weight"])
    small = NativeDraftBlocks(tmp_path, pair.native_target, head, 512, small=True)
    pages, features = np.array([7, 3], dtype=np.int32), torch.randn(20, 3 * 64)
    found = []
    for blocks in (pair.native, small):
        blocks.write_context([Span(0, 20, pages)], features)
        found.append(blocks.draft([Span(20, 5, pages)], [4], [draws(5, temperature=20.0)])[0])
    exact, rounded = found
    assert not torch.equal(exact.laws[0], rounded.laws[0])
    assert (exact.laws[0] - rounded.laws[0]).abs().sum() < 0.1
    assert rounded.laws.sum(-1).tolist() == pytest.approx([1.0] * 5, abs=1e-5)


@pytest.mark.parametrize("where", ["native", "torch"])
def test_q_is_what_the_token_was_drawn_from_and_never_looks_ahead(tmp_path, where):
    pair = Pair(tmp_path, reduced=True)
    blocks = pair.native if where == "native" else pair.torch
    pages = np.arange(3, dtype=np.int32)
    blocks.write_context([Span(0, 12, pages)], torch.randn(12, 3 * 64))
    ids = pair.model.d2t.tolist()
    by_prefix: dict[tuple[int, ...], torch.Tensor] = {}
    for grid in np.random.default_rng(0).random((40, 3)):
        how = [SlotDraw(SamplingParams(temperature=8.0, top_p=0.9), u=float(u)) for u in grid]
        (drawn,) = blocks.draft([Span(12, 3, pages)], [5], [how])
        for k, u in enumerate(grid):
            law, place = drawn.laws[k], ids.index(drawn.tokens[k])
            below = float(law[:place].sum())
            assert below - 1e-5 <= u <= below + float(law[place]) + 1e-5
            prefix = tuple(drawn.tokens[:k])
            assert torch.allclose(by_prefix.setdefault(prefix, law.clone()), law, atol=1e-6)
    assert len(by_prefix) > 10


def run(pair: Pair, where: str, policy: str, requests, **kwargs):
    engine = pair.engine(where, policy, **kwargs)
    for name, (prompt, params) in requests.items():
        engine.add(name, prompt, **params)
    engine.run()
    return engine


@pytest.mark.parametrize("where", ["native", "torch"])
@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
def test_greedy_and_seeded_texts_are_the_same_with_and_without(tmp_path, where, reduced):
    pair = Pair(tmp_path, reduced=reduced)
    requests = {
        str(i): (
            [3 + i, 5, 7, 9 + i] * (2 + i),
            {
                "max_tokens": 40,
                "ignore_eos": True,
                **({"seed": i, "top_p": 0.95} if i % 2 else {"temperature": 0.0}),
            },
        )
        for i in range(6)
    }
    plain = run(pair, where, "off", requests).texts()
    assert run(pair, where, "fixed:4", requests).texts() == plain
    assert run(pair, where, "fixed:2", requests).texts() == plain


def observed(pair: Pair, where: str, text: list[int], pieces: list[int]) -> DSparkDrafter:
    """A drafter that saw the text arrive in pieces, the last tokens of each as accepted drafts."""
    drafter = pair.drafter(where)
    executor = pair.native_target if where == "native" else pair.torch_target
    pages, start = np.arange(8, dtype=np.int32), 0
    for size in pieces:
        known = text[: start + 1]
        # Two drafts more than are accepted: their rows must leave no trace.
        block = [*text[start + 1 : start + size], 1, 2] if start else text[1:size]
        batch = VerificationBatch((item(known, start, 1 + len(block), pages, draft=block),))
        output = executor.forward(batch, drafter.feature_layers)
        drafter.observe(batch, output.features, [Verdict(accepted=size - 1)])
        start += size
    return drafter


@pytest.mark.parametrize("where", ["native", "torch"])
def test_context_after_many_rounds_is_that_of_one(tmp_path, where):
    pair = Pair(tmp_path)
    text = np.random.default_rng(2).integers(0, VOCAB, 41).tolist()
    state = SamplingState(SamplingParams(), VOCAB, frozenset(), stream=(1, 2, 3, 4))
    request = DraftRequest(0, np.array(text), 4, 3, np.arange(8, dtype=np.int32), state)
    (once,) = observed(pair, where, text, [40]).draft([request])
    (many,) = observed(pair, where, text, [17, 1, 4, 2, 5, 1, 1, 6, 3]).draft([request])
    assert once.tokens == many.tokens
    assert torch.allclose(once.q, many.q, atol=1e-5)
    assert once.confidence == pytest.approx(many.confidence, rel=1e-5, abs=1e-5)


def test_a_prefix_hit_leaves_the_drafter_as_informed_as_a_fresh_start(tmp_path):
    pair = Pair(tmp_path)
    prompt = np.random.default_rng(4).integers(3, VOCAB, 50).tolist()
    params = {"max_tokens": 30, "temperature": 0.0, "ignore_eos": True}
    fresh = run(pair, "native", "fixed:4", {"a": (prompt, params)})
    engine = pair.engine("native", "fixed:4")
    usages = []
    for name in ("a", "b"):
        active = engine.add(name, prompt, **params)
        engine.run()
        usages.append(active.usage)
    assert engine.texts()["a"] == engine.texts()["b"] == fresh.texts()["a"]
    assert (usages[0].cached_tokens, usages[1].cached_tokens) == (0, 48)
    assert usages[0].accepted_tokens == usages[1].accepted_tokens
    assert usages[0].draft_tokens == usages[1].draft_tokens > 0


def test_a_preempted_sequence_drafts_what_it_would_have_drafted(tmp_path):
    """Pages run out, sequences lose theirs and recompute: context K/V comes back with the target's."""
    from engine.outputs import NullObserver

    pair = Pair(tmp_path)

    def run_with(pages: int):
        drafter, drafted, events = pair.drafter("native"), {}, []
        plain = drafter.draft

        class Counter(NullObserver):
            def preempted(self) -> None:
                events.append("preempted")

        def remembering(requests):
            blocks = plain(requests)
            for request, block in zip(requests, blocks, strict=True):
                drafted[tuple(request.tokens.tolist())] = block.tokens
            return blocks

        drafter.draft = remembering
        engine = Engine(
            pair.decoder,
            drafter,
            "fixed:4",
            num_pages=pages,
            page_size=16,
            wrap=lambda _: pair.native_target,
            observer=Counter(),
        )
        for i in range(6):
            engine.add(str(i), [3 + i, 5, 7, 9 + i] * 8, max_tokens=60, temperature=0.0, ignore_eos=True)
        engine.run()
        return engine.texts(), drafted, len(events)

    texts, drafted, none = run_with(PAGES)
    tight_texts, tight_drafted, some = run_with(16)
    assert none == 0 < some
    assert tight_texts == texts
    # Greedy, so a function of the text, its context K/V and the number of slots.
    same = [
        (block, tight_drafted[text])
        for text, block in drafted.items()
        if len(tight_drafted.get(text, ())) == len(block)
    ]
    assert len(same) > 100
    assert all(ours == wanted for ours, wanted in same)
