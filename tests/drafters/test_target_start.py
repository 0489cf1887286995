"""A draft model that begins as the target's last layers computes what they do, where it can."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drafters import checkpoint
from drafters.config import DraftConfig
from drafters.model import DraftModel
from drafters.training.target_start import begin_as_target, fits
from engine.models.config import ModelConfig
from tests.engine.harness import hf_model

WIDTH = 48


def target(family: str) -> tuple[Any, ModelConfig, list[dict[str, torch.Tensor]]]:
    model = hf_model(family, num_hidden_layers=4)
    layers = [{name: w.detach() for name, w in layer.named_parameters()} for layer in model.model.layers]
    return model, ModelConfig.from_dict(model.config.to_dict()), layers


def fresh(config: ModelConfig, model: Any, **shape: Any) -> Any:
    given = {"mask_token_id": 3, "target_layer_ids": (0, 2), "num_layers": 1, "window": None} | shape
    head = model.get_output_embeddings().weight.detach()
    return checkpoint.build(
        DraftConfig.for_target(config, **given), model.get_input_embeddings().weight.detach(), head
    ).eval()


@torch.no_grad()
def states(model: Any, length: int = 20) -> list[torch.Tensor]:
    """What enters each layer [S, d], and what the head reads."""
    ids = torch.arange(4, 4 + length)[None]
    return [state[0] for state in model(ids, output_hidden_states=True).hidden_states]


@pytest.mark.parametrize("kv_heads", [None, 6])
@torch.no_grad()
def test_a_block_is_the_targets_last_layer(kv_heads: int | None) -> None:
    """Qwen3 norms queries and keys like the draft model, so nothing is lost."""
    model, config, layers = target("qwen3")
    draft = fresh(config, model, kv_heads=kv_heads)
    seen = states(model)
    features, scale = torch.cat((seen[1], seen[3]), -1), torch.linspace(0.5, 2.0, 2 * WIDTH)
    begin_as_target(draft, config, layers[-1:], model.model.norm.weight, seen[3], scale[-WIDTH:])
    positions = torch.arange(len(features))
    context = draft.context(features / scale, positions)
    last = len(features) - 1
    pairs = [(k[:last], v[:last]) for k, v in context]
    out = draft.block(seen[3][None, last:], torch.tensor([last]), pairs)
    assert torch.allclose(out[0, 0], seen[4][last], atol=1e-4)


@torch.no_grad()
def test_queries_and_keys_keep_their_size_where_the_target_does_not_norm_them() -> None:
    model, config, layers = target("llama")
    draft = fresh(config, model, num_layers=2)
    seen = states(model)
    begin_as_target(draft, config, layers[-2:], model.model.norm.weight, seen[3], torch.ones(WIDTH))
    (keys, values), _ = draft.context(torch.cat((seen[1], seen[3]), -1), torch.arange(len(seen[3])))
    own = torch.nn.functional.rms_norm(
        seen[3], (WIDTH,), layers[-2]["input_layernorm.weight"], config.rms_eps
    )
    assert torch.allclose(values.flatten(1), own @ layers[-2]["self_attn.v_proj.weight"].T, atol=1e-4)
    plain = (own @ layers[-2]["self_attn.k_proj.weight"].T).pow(2).mean().sqrt()
    assert float(keys.pow(2).mean().sqrt() / plain) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("family", ["eagle3", "mtp"])
@torch.no_grad()
def test_chains_take_what_fits_beside_the_embedding(family: str) -> None:
    model, config, layers = target("qwen3")
    draft = fresh(config, model, family=family)
    seen = states(model)
    hidden = seen[4] if family == "mtp" else seen[3]
    features = seen[4] if family == "mtp" else torch.cat((seen[1], seen[3]), -1)
    begin_as_target(draft, config, layers[-1:], model.model.norm.weight, hidden, torch.ones(WIDTH))
    draft.enorm.weight.zero_()  # without embeddings
    positions = torch.arange(len(hidden))
    keys, values = draft.context(draft.fuse(features), torch.zeros(len(hidden), dtype=torch.int64), positions)
    first = layers[-1]["input_layernorm.weight"]
    own = torch.nn.functional.rms_norm(hidden, (WIDTH,), first, config.rms_eps)
    assert torch.allclose(values.flatten(1), own @ layers[-1]["self_attn.v_proj.weight"].T, atol=1e-3)
    ones = keys.pow(2).mean().sqrt()
    assert torch.isfinite(ones)
    assert torch.equal(draft.norm.weight, model.model.norm.weight)


def test_what_does_not_fit_is_left_alone() -> None:
    model, config, _ = target("llama")
    draft = fresh(config, model)
    assert isinstance(draft, DraftModel)
    assert fits(draft, config)
    other = ModelConfig.from_dict(hf_model("llama", intermediate_size=96).config.to_dict())
    assert not fits(draft, other)
    assert not fits(fresh(config, model, num_layers=5), config)
    assert fits(fresh(config, model, kv_heads=6), config)
