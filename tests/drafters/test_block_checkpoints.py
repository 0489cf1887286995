"""Block checkpoints of other projects from their files on: names, shapes, vocabularies, own heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.checkpoint import load
from drafters.config import DraftConfig
from drafters.model import DraftModel
from drafters.stored_tensors import differs, target_ids
from tests.drafters.checkpoints import (
    DRAFT_VOCAB,
    HIDDEN,
    LAYERS,
    VOCAB,
    Checkpoint,
    block_logits,
    layer,
    matrix,
    norm_weight,
)

RANK, MASK = 16, 9
HEADS = {
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def tensors(features: int = 3, vocab: int = VOCAB) -> dict[str, torch.Tensor]:
    """The names and shapes of DeepSpec's checkpoints, which speculators' share."""
    out = {"fc.weight": matrix(HIDDEN, features * HIDDEN)}
    out |= {name: norm_weight() for name in ("hidden_norm.weight", "norm.weight")}
    for number in range(2):
        out |= layer(f"layers.{number}")
    out["markov_head.markov_w1.weight"] = matrix(VOCAB, RANK)
    out["markov_head.markov_w2.weight"] = matrix(vocab, RANK)
    out["confidence_head.proj.weight"] = matrix(1, HIDDEN + RANK)
    out["confidence_head.proj.bias"] = torch.randn(1)
    return out


def deepspec() -> Checkpoint:
    embedding, head = matrix(VOCAB, HIDDEN), matrix(VOCAB, HIDDEN)
    config = {
        **LAYERS, **HEADS, "num_hidden_layers": 2, "architectures": ["Qwen3DSparkModel"], "block_size": 5,
        "mask_token_id": MASK, "target_layer_ids": [1, 4, 7], "num_target_layers": 10, "num_anchors": 512,
        "layer_types": ["full_attention"] * 2,
    }  # fmt: skip
    stored = tensors() | {"embed_tokens.weight": embedding.clone(), "lm_head.weight": head.clone()}
    return Checkpoint(config, stored, embedding, head)


def speculators(ids_form: bool = False) -> Checkpoint:
    """Part of the vocabulary, with a head and an embedding that were trained."""
    ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    stored = tensors(vocab=DRAFT_VOCAB) | {
        "embed_tokens.weight": matrix(VOCAB, HIDDEN),
        "lm_head.weight": matrix(DRAFT_VOCAB, HIDDEN),
        "d2t": ids if ids_form else ids - torch.arange(DRAFT_VOCAB),
        "t2d": torch.isin(torch.arange(VOCAB), ids),
    }
    config = {
        **HEADS, "speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"], "block_size": 5,
        "mask_token_id": MASK, "transformer_layer_config": {**LAYERS, "num_hidden_layers": 2},
        "aux_hidden_state_layer_ids": [2, 5, 8], "sample_from_anchor": True, "draft_vocab_size": DRAFT_VOCAB,
    }  # fmt: skip
    return Checkpoint(config, stored, matrix(VOCAB, HIDDEN), matrix(VOCAB, HIDDEN), ids)


def loaded(checkpoint: Checkpoint, folder) -> DraftModel:
    model = load(checkpoint.write(folder), checkpoint.embedding, checkpoint.head)
    assert isinstance(model, DraftModel)
    return model.eval()


def our_logits(model: DraftModel, features: torch.Tensor, previous: list[int], at: int | None = None):
    """(logits, confidence) of all predictions of one block behind the features."""
    anchor = torch.tensor([len(features) if at is None else at])
    with torch.no_grad():
        slots = model.slots(torch.tensor(previous[:1]), model.config.block_size)
        hidden = model(features, anchor, slots)[:, model.config.unread :]
        logits, confidence = model.block_logits(hidden, torch.tensor([previous]))
    return logits[0], confidence[0]


@pytest.mark.parametrize("make", [deepspec, speculators, lambda: speculators(ids_form=True)])
def test_a_checkpoint_computes_what_its_project_does(make, tmp_path):
    torch.manual_seed(5)
    checkpoint = make()
    model = loaded(checkpoint, tmp_path)
    features, previous = torch.randn(9, 3 * HIDDEN), torch.randint(0, VOCAB, (5,)).tolist()
    wanted, chances = block_logits(checkpoint, features, [previous[0], *[MASK] * 4], previous)
    found, confidence = our_logits(model, features, previous)
    assert torch.allclose(found, wanted, atol=1e-3)
    assert torch.allclose(confidence, chances, atol=1e-3)
    assert (model.d2t is None) == (checkpoint.ids is None)
    if model.d2t is not None:
        assert torch.equal(model.d2t, checkpoint.ids)


def test_a_shift_by_one_slot_position_or_layer_changes_the_logits(tmp_path):
    torch.manual_seed(5)
    checkpoint = deepspec()
    model = loaded(checkpoint, tmp_path / "right")
    features, previous = torch.randn(9, 3 * HIDDEN), torch.randint(0, VOCAB, (5,)).tolist()
    right, _ = our_logits(model, features, previous)
    late, _ = our_logits(model, features, previous, at=8)
    assert not torch.allclose(right, late, atol=0.05)
    checkpoint.config["sample_from_anchor"] = False
    shifted = loaded(checkpoint, tmp_path / "shifted")
    assert shifted.config.gamma == 4
    found, _ = our_logits(shifted, features, previous[:4])
    assert not torch.allclose(right[:4], found, atol=0.05)
    assert DraftConfig.from_dict(speculators().config).target_layer_ids == (1, 4, 7)
    assert DraftConfig.from_dict(deepspec().config).target_layer_ids == (1, 4, 7)


def test_a_copy_of_the_targets_is_told_from_a_trained_one():
    ours = torch.randn(5000, 16)
    assert not differs(None, ours)
    assert not differs(ours.bfloat16(), ours)
    changed = ours.clone()
    changed[4900, 3] += 0.1  # one trained token is enough
    assert differs(changed, ours)
    with pytest.raises(ValueError, match="another target"):
        differs(torch.randn(4999, 16), ours)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_vocabulary_is_found_in_either_form(data):
    size = data.draw(st.integers(2, 30))
    chosen = data.draw(st.lists(st.integers(0, 39), min_size=size, max_size=size, unique=True))
    ids = torch.tensor(chosen)
    known = torch.isin(torch.arange(40), ids)
    for form in (ids, ids - torch.arange(size)):
        assert torch.equal(target_ids(form, 40, known), ids)
    assert torch.equal(target_ids(ids - torch.arange(size), 40), ids)
    if int((ids + torch.arange(size)).max()) >= 40:
        assert torch.equal(target_ids(ids, 40), ids)


def test_a_mapping_that_names_no_set_of_tokens_is_refused(tmp_path):
    for broken in (torch.zeros(4), torch.tensor([0, 1, 2, 60])):
        with pytest.raises(ValueError, match="d2t"):
            target_ids(broken, 60, torch.zeros(60, dtype=torch.bool))
    with pytest.raises(ValueError, match="d2t"):
        target_ids(torch.tensor([5, 5, 90]), 60)
    checkpoint = speculators()
    del checkpoint.tensors["d2t"]
    with pytest.raises(ValueError, match="no d2t"):
        loaded(checkpoint, tmp_path)


def test_a_mapping_of_all_tokens_is_none(tmp_path):
    checkpoint = deepspec()
    checkpoint.tensors["d2t"] = torch.zeros(VOCAB, dtype=torch.int64)
    assert loaded(checkpoint, tmp_path).d2t is None


def test_sliding_attention_is_a_window_or_refused():
    slides = {"use_sliding_window": True, "sliding_window": 128}
    uniform = {**deepspec().config, **slides, "layer_types": ["sliding_attention"] * 2}
    assert DraftConfig.from_dict(uniform).window == 128
    with pytest.raises(ValueError, match="mix"):
        DraftConfig.from_dict({**uniform, "layer_types": ["sliding_attention", "full_attention"]})
    raw = speculators().config
    raw["transformer_layer_config"] |= {**slides, "layer_types": ["sliding_attention"] * 2}
    with pytest.raises(ValueError, match="causal within the block"):
        DraftConfig.from_dict(raw)
    assert DraftConfig.from_dict({**raw, "sliding_window_non_causal": True}).window == 128


class TestBesideTheKernels:
    """The same checkpoints on the native executor."""

    @pytest.fixture
    def world(self):
        from engine.native.loader import supported

        if not supported():
            pytest.skip("the kernels were not built")
        from tests.engine.test_native_draft import World

        return World()

    @staticmethod
    def stored(world, **changes: torch.Tensor) -> Checkpoint:
        """The world's draft model as DeepSpec would store it."""
        target = world.target_tensors
        kept = {
            **world.tensors,
            "embed_tokens.weight": target["model.embed_tokens.weight"],
            "lm_head.weight": target["lm_head.weight"],
            "markov_head.markov_w1.weight": world.w1,
            "markov_head.markov_w2.weight": world.w2,
            "confidence_head.proj.weight": world.confidence[None],
            "confidence_head.proj.bias": torch.tensor([0.25]),
            **changes,
        }
        shapes = world.config
        config = {
            **LAYERS, **HEADS, "markov_rank": world.w1.shape[1], "architectures": ["Qwen3DSparkModel"],
            "vocab_size": world.target_config.vocab_size, "hidden_size": shapes.hidden_size,
            "intermediate_size": shapes.intermediate_size, "num_hidden_layers": shapes.num_layers,
            "num_attention_heads": shapes.num_heads, "num_key_value_heads": shapes.num_kv_heads,
            "head_dim": shapes.head_dim, "rms_norm_eps": shapes.rms_eps, "rope_theta": shapes.rope_theta,
            "block_size": 5, "mask_token_id": 3, "target_layer_ids": [0, 1, 2],
        }  # fmt: skip
        return Checkpoint(config, kept, target["model.embed_tokens.weight"], target["lm_head.weight"])

    @staticmethod
    def logits(world, folder) -> torch.Tensor:
        from drafters.native_blocks import NativeDraftBlocks
        from drafters.target_tensors import TargetTensors
        from engine.native.draft import Span
        from tests.engine.test_native_draft import FEATURES, rows

        target = world.target_tensors
        borrowed = TargetTensors(
            world.target_config,
            target["model.embed_tokens.weight"],
            target["lm_head.weight"],
            target["model.norm.weight"],
            folder,
        )
        blocks = NativeDraftBlocks(
            folder, world.target, rows(target["lm_head.weight"]), 512, borrowed=lambda: borrowed
        )
        torch.manual_seed(1)
        features, pages = torch.randn(20, FEATURES * world.config.hidden_size), np.arange(2, dtype=np.int32)
        blocks.write_context([Span(0, 20, pages)], features)
        return blocks.model.backbone([Span(20, 5, pages)], [4, 3, 3, 3, 3])[0]

    def test_copies_of_the_targets_change_nothing(self, world, tmp_path):
        checkpoint = self.stored(world)
        full = self.logits(world, checkpoint.write(tmp_path / "full"))
        for name in ("embed_tokens.weight", "lm_head.weight"):
            del checkpoint.tensors[name]
        assert torch.equal(full, self.logits(world, checkpoint.write(tmp_path / "bare")))

    def test_a_head_of_its_own_counts(self, world, tmp_path):
        plain = self.logits(world, self.stored(world).write(tmp_path / "plain"))
        head = world.target_tensors["lm_head.weight"].flip(0)
        own = self.logits(world, self.stored(world, **{"lm_head.weight": head}).write(tmp_path / "own"))
        assert torch.allclose(own, plain.flip(1), atol=1e-4)
        assert not torch.allclose(own, plain, atol=0.1)

    def test_an_embedding_of_its_own_is_refused_with_what_to_do(self, world, tmp_path):
        embedding = world.target_tensors["model.embed_tokens.weight"].flip(0)
        folder = self.stored(world, **{"embed_tokens.weight": embedding}).write(tmp_path)
        with pytest.raises(ValueError, match="--executor torch"):
            self.logits(world, folder)
