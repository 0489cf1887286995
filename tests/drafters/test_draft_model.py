"""The draft model in torch against the equations written down plainly, and against the kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from drafters.checkpoint import load, load_tensors, save
from drafters.config import DraftConfig, spaced_layers
from drafters.model import DraftModel
from engine.native.loader import supported
from tests.engine.test_native_draft import FEATURES, RANK, World, close

pytestmark = pytest.mark.skipif(not supported(), reason="the reference lives beside the kernels' tests")

KINDS = {"markov": "vanilla", "gated": "gated", "rnn": "rnn"}


def model_of(world: World, window: int | None = None) -> DraftModel:
    """The world's draft model as a torch module."""
    config = DraftConfig(
        world.config,
        block_size=5,
        mask_token_id=3,
        target_layer_ids=(0, 1, 2),
        head=KINDS[world.kind],
        rank=RANK,
        window=window,
        draft_vocab_size=len(world.ids) if len(world.ids) < world.target_config.vocab_size else None,
    )
    ids = torch.from_numpy(world.ids).long() if config.draft_vocab_size else None
    model = DraftModel(config, world.target_tensors["model.embed_tokens.weight"], world.head, ids)
    own = {
        name: value
        for name, value in world.tensors.items()
        if name not in ("embed_tokens.weight", "lm_head.weight")
    }
    heads = {"markov_head.markov_w1.weight": world.w1, "markov_head.markov_w2.weight": world.w2}
    name = {"gated": "gate_proj", "rnn": "joint_proj"}.get(world.kind)
    if name:
        heads |= {f"markov_head.{name}.weight": world.mix, f"markov_head.{name}.bias": world.mix_bias}
    confidence = {
        "confidence_head.proj.weight": world.confidence[None],
        "confidence_head.proj.bias": torch.tensor([0.25]),
    }
    model.load_state_dict(own | heads | confidence)
    return model.eval()


@pytest.mark.parametrize("window", [None, 7])
def test_backbone_is_the_plain_one_for_every_block(window):
    world = World()
    model = model_of(world, window)
    features = torch.randn(40, FEATURES * world.config.hidden_size)
    anchors = torch.tensor([3, 11, 12, 39])
    tokens = torch.tensor([5, 6, 7, 8])
    with torch.no_grad():
        hidden = model(features, anchors, model.slots(tokens, 5))
    for row, (anchor, token) in enumerate(zip(anchors.tolist(), tokens.tolist(), strict=True)):
        block = torch.tensor([token, 3, 3, 3, 3])
        _, wanted = world.backbone(features[:anchor], block, window)
        assert torch.allclose(hidden[row], wanted, atol=1e-4)


def test_texts_behind_one_another_do_not_see_each_other():
    world = World()
    model = model_of(world, 16)
    a, b = (torch.randn(size, FEATURES * world.config.hidden_size) for size in (20, 30))
    blocks = model.slots(torch.tensor([5, 6]), 5)
    with torch.no_grad():
        alone = model(b, torch.tensor([4, 25]), blocks)
        start, positions = torch.tensor([20, 20]), torch.cat((torch.arange(20), torch.arange(30)))
        together = model(torch.cat((a, b)), torch.tensor([24, 45]), blocks, (start, positions))
    assert torch.allclose(alone, together, atol=1e-5)


def test_every_slot_and_position_counts():
    """The anchor's token, its place, the order of the slots, each feature in the window, and none outside."""
    world = World()
    model = model_of(world, 6)
    features = torch.randn(30, FEATURES * world.config.hidden_size)

    def hidden(at: int = 20, token: int = 5, source: torch.Tensor = features) -> torch.Tensor:
        with torch.no_grad():
            return model(source, torch.tensor([at]), model.slots(torch.tensor([token]), 5))[0]

    base = hidden()
    assert not torch.allclose(base, hidden(at=21), atol=1e-3)
    assert not torch.allclose(base, hidden(token=6), atol=1e-3)
    assert not torch.allclose(base[1], base[2], atol=1e-3)
    for place in range(30):
        changed = features.clone()
        changed[place] += 1.0
        assert torch.allclose(base, hidden(source=changed), atol=1e-5) == (place not in range(14, 20))


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
@pytest.mark.parametrize("kind", KINDS)
def test_heads_are_the_plain_ones(kind, reduced):
    world = World(kind, reduced)
    model = model_of(world)
    hidden = torch.randn(3, 5, world.config.hidden_size)
    previous = torch.randint(0, world.target_config.vocab_size, (3, 5))
    with torch.no_grad():
        logits, confidence = model.block_logits(hidden, previous)
    for row in range(3):
        base = hidden[row] @ world.head.T
        wanted, chances = world.corrected(base, hidden[row], previous[row].tolist())
        assert torch.allclose(logits[row], wanted, atol=1e-4)
        assert torch.allclose(confidence[row], torch.tensor(chances), atol=1e-4)


def test_confidence_never_sees_its_own_token():
    world = World()
    model = model_of(world)
    hidden, previous = torch.randn(1, 5, world.config.hidden_size), torch.arange(5)[None]
    with torch.no_grad():
        base = model.block_logits(hidden, previous)[1]
        for slot in range(5):
            changed = previous.clone()
            changed[0, slot] += 20
            differs = (model.block_logits(hidden, changed)[1] != base)[0]
            assert differs.tolist() == [k == slot for k in range(5)]


def test_torch_and_kernels_draft_alike():
    import numpy as np

    from engine.native.draft import Span

    world = World()
    model = model_of(world)
    features = torch.randn(33, FEATURES * world.config.hidden_size)
    pages = np.arange(5, dtype=np.int32)
    world.draft.write_context([Span(0, 33, pages)], features)
    logits, hidden = world.draft.backbone([Span(33, 5, pages)], [9, 3, 3, 3, 3])
    with torch.no_grad():
        ours = model(features, torch.tensor([33]), model.slots(torch.tensor([9]), 5))[0]
    close(hidden, ours)
    close(logits, ours @ world.head.T)


def test_a_checkpoint_comes_back(tmp_path):
    for kind, reduced in (("markov", False), ("rnn", True), ("gated", False)):
        world = World(kind, reduced)
        model = model_of(world)
        folder = tmp_path / f"{kind}-{reduced}"
        save(model, folder, torch.float32)
        config, tensors = load_tensors(folder)
        assert not {"embed_tokens.weight", "lm_head.weight"} & set(tensors)
        assert (config.block_size, config.head, config.rank) == (5, KINDS[kind], RANK)
        again = load(
            folder,
            model.embedding,
            world.target_tensors["lm_head.weight"] if not reduced else model.embedding,
        )
        for name, value in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], value)
        assert (again.d2t is None) == (not reduced)


def test_missing_confidence_weights_turn_the_head_off(tmp_path):
    from safetensors.torch import save_file

    model = model_of(World())
    save(model, tmp_path, torch.float32)
    kept = {k: v for k, v in load_tensors(tmp_path)[1].items() if not k.startswith("confidence_head")}
    save_file(kept, tmp_path / "model.safetensors")
    config, _ = load_tensors(tmp_path)
    assert not config.confidence
    assert load(tmp_path, model.embedding, model.head).confidence_head is None


def test_a_missing_weight_is_an_error(tmp_path):
    from safetensors.torch import save_file

    model = model_of(World())
    save(model, tmp_path, torch.float32)
    kept = {k: v for k, v in load_tensors(tmp_path)[1].items() if k != "fc.weight"}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"fc\.weight"):
        load(tmp_path, model.embedding, model.head)


def test_dflash_is_the_same_without_a_head():
    world = World()
    config = replace(model_of(world).config, head="none", rank=0, confidence=False)
    model = DraftModel(config, world.target_tensors["model.embed_tokens.weight"], world.head)
    assert not [name for name in model.state_dict() if "markov" in name or "confidence" in name]
    hidden = torch.randn(2, 5, world.config.hidden_size)
    logits, confidence = model.block_logits(hidden, torch.zeros(2, 5, dtype=torch.int64))
    assert confidence is None
    assert torch.equal(logits, hidden @ world.head.T)


def test_dflash_checkpoints_are_read_in_their_own_dialect():
    raw = DraftConfig.for_target(World().target_config, mask_token_id=3, head="none").to_dict()
    for name in ("mask_token_id", "target_layer_ids", "sample_from_anchor", "enable_confidence_head"):
        del raw[name]
    raw |= {"architectures": ["DFlashDraftModel"], "block_size": 16}
    raw["dflash_config"] = {"mask_token_id": 9, "target_layer_ids": [1, 2]}
    config = DraftConfig.from_dict(raw)
    assert (config.mask_token_id, config.target_layer_ids, config.head) == (9, (1, 2), "none")
    assert (config.block_size, config.gamma, config.confidence) == (16, 15, False)
    with pytest.raises(ValueError, match="SomethingElse"):
        DraftConfig.from_dict({**raw, "architectures": ["SomethingElse"]})


def test_layers_are_spaced_evenly():
    assert spaced_layers(36, 5) == (1, 9, 17, 25, 33)
    assert spaced_layers(30, 3) == (1, 14, 27)
    assert spaced_layers(30, 1) == (15,)
