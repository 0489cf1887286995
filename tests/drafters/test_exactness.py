"""What is emitted is the target's law, whichever drafter proposes: real drafters, enumerated draw by draw.

Every draft that a drafter can draw, with the chance that its own uniforms give it, goes through the real
verification at every verify length. `q` is fp32, so laws are compared to 1e-6.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import pytest
import torch

from drafters import slots
from drafters.blocks import TorchDraftBlocks
from drafters.chain import ChainModel
from drafters.chain_drafter import ChainDrafter
from drafters.checkpoint import save
from drafters.config import DraftConfig
from drafters.dspark import DSparkDrafter
from drafters.hybrid import HybridDrafter
from drafters.model import DraftModel
from drafters.native_blocks import NativeDraftBlocks
from drafters.ngram import NgramDrafter
from engine.batch import DraftBlock, Verdict, VerificationBatch
from engine.drafter import DraftRequest
from engine.models.config import ModelConfig
from engine.native.draft import Span
from engine.native.loader import supported
from engine.native.weights import as_bf16
from engine.native_executor import NativeExecutor
from engine.params import SamplingParams
from tests.engine.enumerate import Enumeration, Text, World, total_variation
from tests.engine.harness import hf_model
from tests.engine.test_forward import item
from tests.engine.test_native_draft import rows

VOCAB, GAMMA, PAGES = 5, 2, 4
SHAPES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
PROCESSORS = {
    "none": SamplingParams(),
    "cold": SamplingParams(temperature=0.5),
    "filters": SamplingParams(temperature=1.5, top_k=3, top_p=0.9, min_p=0.05),
    "penalties": SamplingParams(
        presence_penalty=0.5, frequency_penalty=-0.25, repetition_penalty=1.25, min_tokens=3
    ),
    "bias": SamplingParams(temperature=0.75, top_p=0.95, logit_bias={1: 0.5, 3: -100.0}),
    "forbidden": SamplingParams(allowed_token_ids=(0, 1, 2, 4), bad_words=((2,), (1, 0), (1, 4, 1))),
}
HEADS = {"markov": "vanilla", "gated": "gated", "rnn": "rnn", "dflash": "none", "masks": "none"}


@dataclass
class Drafted(World):
    """A world whose drafts are a real drafter's."""

    drafter: object = None  # type: ignore[assignment]
    _laws: dict[Text, list[float]] = field(default_factory=dict)
    _d2t: Text | None = None

    @property
    def d2t(self) -> Text | None:  # type: ignore[override]
        return self._d2t

    def q(self, prefix: Text) -> list[float]:
        return self._laws[prefix]

    def propose(self, us: list[float]) -> DraftBlock:
        text = np.array(self.prompt + self.output, dtype=np.int32)
        request = DraftRequest(0, text, self.gamma, 1, np.arange(PAGES, dtype=np.int32), self.state)
        with mock.patch.object(slots, "host_uniforms", return_value=[us]):
            (block,) = self.drafter.draft([request])
        return block

    def drafts(self) -> Iterator[tuple[DraftBlock, float]]:
        """Every block that some uniforms lead to, with the width of the cell of uniforms that do."""
        pending: list[tuple[list[float], float]] = [([], 1.0)]
        while pending:
            us, weight = pending.pop()
            block = self.propose(us + [0.5] * (self.gamma - len(us)))
            if block.d2t is not None:
                self._d2t = tuple(block.d2t.tolist())
            if len(us) == len(block):
                yield block, weight
                continue
            law = block.q[len(us)].double()
            self._laws[block.tokens[: len(us)]] = law.tolist()
            chances = law / law.sum()
            ends = chances.cumsum(0)
            for chance, end in zip(chances.tolist(), ends.tolist(), strict=True):
                if chance:
                    pending.append(([*us, end - chance / 2], weight * chance))


def chain(family: str, target: ModelConfig, embedding, head, d2t, norm) -> ChainDrafter:
    config = DraftConfig.for_target(
        target,
        block_size=GAMMA,
        mask_token_id=0,
        target_layer_ids=(0, 1),
        family=family,
        draft_vocab_size=None if d2t is None else len(d2t),
    )
    model = ChainModel(config, embedding, head, d2t)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.12)
    return ChainDrafter(model, "tiny", PAGES, 16, norm if family == "mtp" else None)


def drafter_of(kind: str, where: str, reduced: bool, folder):
    """A random drafter that has seen the prompt."""
    torch.manual_seed(4)
    hf = hf_model("llama", initializer_range=0.5, **SHAPES)
    target, tensors = ModelConfig.from_dict(hf.config.to_dict()), hf.state_dict()
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    d2t = torch.tensor([0, 1, 4]) if reduced else None
    rows_of_head = head if d2t is None else head[d2t]
    length = len(World(SamplingParams()).prompt)
    pages = np.arange(PAGES, dtype=np.int32)
    if kind in ("eagle3", "mtp"):
        drafter = chain(kind, target, embedding, rows_of_head, d2t, tensors["model.norm.weight"])
        text = [*World(SamplingParams()).prompt, *World(SamplingParams()).output]
        batch = VerificationBatch((item(text[:length], 0, length, pages),))
        width = len(drafter.feature_layers) * 64
        drafter.observe(batch, torch.randn(length, width), [Verdict((text[-1],))])
        return drafter
    config = DraftConfig.for_target(
        target,
        block_size=GAMMA + (kind == "masks"),
        sample_from_anchor=kind != "masks",
        mask_token_id=0,
        target_layer_ids=(0, 1),
        head=HEADS[kind],
        rank=32,
        num_layers=1,
        draft_vocab_size=None if d2t is None else len(d2t),
    )
    model = DraftModel(config, embedding, rows_of_head, d2t)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.12)
    blocks = TorchDraftBlocks(model, PAGES, 16)
    if where == "native":
        save(model, folder)
        executor = NativeExecutor(target, as_bf16(tensors.items()), PAGES, 1, 64)
        blocks = NativeDraftBlocks(folder, executor, rows(head), 64)
    blocks.write_context([Span(0, length, pages)], torch.randn(length, 2 * 64))
    return DSparkDrafter(config, blocks, 16, "tiny", d2t)


CASES = [(kind, where) for kind in HEADS for where in ("torch", "native")] + [
    ("eagle3", "torch"),
    ("mtp", "torch"),
]


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("params", PROCESSORS.values(), ids=PROCESSORS.keys())
@pytest.mark.parametrize(("kind", "where"), CASES, ids=["-".join(case) for case in CASES])
def test_the_law_is_the_targets(kind, where, params, reduced, tmp_path):
    if where == "native" and not supported():
        pytest.skip("the kernels were not built")
    stop = frozenset({3}) if params.min_tokens else frozenset()
    drafter = drafter_of(kind, where, reduced, tmp_path)
    assert_lossless(Drafted(params, vocab=VOCAB, gamma=GAMMA, seed=2, stop_ids=stop, drafter=drafter))


@pytest.mark.parametrize("output", [(1,), (2, 0, 2)], ids=["model", "lookup"])
def test_the_hybrid_is_exact_whichever_it_takes(output, tmp_path):
    model = drafter_of("markov", "torch", False, tmp_path)
    drafter = HybridDrafter(NgramDrafter(1, 3), model)
    if len(output) > 1:
        model.blocks.write_context([Span(0, 4, np.arange(PAGES, dtype=np.int32))], torch.randn(4, 2 * 64))
        drafter._all = type(drafter._all)(1.0, 10.0)  # the model has done badly
    world = Drafted(SamplingParams(), vocab=VOCAB, gamma=GAMMA, output=output, drafter=drafter)
    if len(output) > 1:
        block = world.propose([0.5] * GAMMA)
        assert block.q is None
        law = Enumeration(world).emitted([(block, len(block))])
        assert total_variation(world.mixture(law, [1.0]), world.target_law()) < 1e-12
    else:
        assert_lossless(world)


def assert_lossless(world: Drafted) -> None:
    """At every verify length; and the drafter's law is one that can go wrong."""
    drafts = list(world.drafts())
    assert sum(weight for _, weight in drafts) == pytest.approx(1.0, abs=1e-9)
    assert len(drafts) > 1
    target = world.target_law(GAMMA + 1)
    for length in range(len(drafts[0][0]) + 1):
        laws = Enumeration(world).emitted([(block, length) for block, _ in drafts])
        law = world.mixture(laws, [weight for _, weight in drafts], GAMMA + 1)
        assert total_variation(law, target) < 1e-6
    if world.params.temperature:  # were drafts believed, the text would have another law
        believed = world.mixture(
            [{block.tokens: 1.0} for block, _ in drafts], [weight for _, weight in drafts], GAMMA + 1
        )
        assert total_variation(believed, target) > 0.05
