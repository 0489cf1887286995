"""A draft checkpoint whose layers or slots are misread is noticed at start.

The target counts: after token t comes t + 1, whatever was before. Each draft model knows its first token for
certain, if it is read as it was meant: an accepted length of nearly 2. Misread, it knows nothing.
"""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from drafters.loading import load_drafter
from engine.models.decoder import FusedDecoder
from engine.torch_executor import TorchExecutor
from server.self_check import SUSPICIOUS, self_check
from tests.drafters.checkpoints import LAYERS, Checkpoint
from tests.engine.harness import Engine, fused, hf_model

SIZE, TARGET_LAYERS = 64, 10  # as wide as there are tokens: every map from tokens to tokens is linear
SHAPES = {
    "hidden_size": SIZE,
    "intermediate_size": 80,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
CONFIG = {**LAYERS, **SHAPES, "vocab_size": SIZE}


def normed(rows: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(rows, rows.shape[-1:], None, 1e-6)


def ahead(rows: torch.Tensor, by: int) -> torch.Tensor:
    """The head [V, d] that makes of row t of [V, d] the token t + by."""
    return (torch.eye(SIZE).roll(by, 0) @ torch.linalg.inv(rows.double().T).float()).contiguous()


class Counting:
    """The target in its folder, and what every layer makes of every token."""

    def __init__(self, folder: Path) -> None:
        model = hf_model("llama", num_hidden_layers=TARGET_LAYERS, initializer_range=0.2, **SHAPES)
        with torch.no_grad():
            model.model.embed_tokens.weight[0].normal_(std=0.2)  # the padding's is zero
            for block in model.model.layers:
                block.self_attn.o_proj.weight.zero_()  # nothing depends on the tokens before
            layers = tuple(range(-1, TARGET_LAYERS))
            hidden, features = self.forward(fused(model), layers)
            self.layers = dict(zip(layers, features.chunk(len(layers), -1), strict=True))
            model.lm_head.weight.copy_(ahead(hidden, 1))
        model.save_pretrained(folder)
        self.folder, self.model = folder, fused(model)
        self.embedding = model.model.embed_tokens.weight.detach()

    @staticmethod
    def forward(model: FusedDecoder, layers: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.arange(SIZE)
        return model.forward(tokens, tokens, lambda _, q, k, v, **how: torch.zeros_like(q), layers)


def silent_layer(prefix: str, width: int) -> dict[str, torch.Tensor]:
    """A draft layer that adds nothing."""
    heads = {"q": 64, "k": 32, "v": 32}
    out = {f"{prefix}.self_attn.{name}_proj.weight": torch.zeros(size, width) for name, size in heads.items()}
    out[f"{prefix}.self_attn.o_proj.weight"] = torch.zeros(SIZE, 64)
    for name, rows, cols in (("gate", 80, SIZE), ("up", 80, SIZE), ("down", SIZE, 80)):
        out[f"{prefix}.mlp.{name}_proj.weight"] = torch.zeros(rows, cols)
    for name in ("input_layernorm", "post_attention_layernorm"):
        out[f"{prefix}.{name}.weight"] = torch.ones(SIZE)
    return out


def eagle(target: Counting) -> Checkpoint:
    """The speculators format: ids 2, 5, 7 are the outputs of layers 1, 4, 6. It hears the first of them."""
    head = ahead(normed(target.layers[1]), 2)  # from a position's feature to the token after the next
    tensors = silent_layer("layers.0", 2 * SIZE) | {
        "fc.weight": torch.cat((torch.eye(SIZE), torch.zeros(SIZE, 2 * SIZE)), 1),
        "layers.0.hidden_norm.weight": torch.ones(SIZE),
        "norm.weight": torch.ones(SIZE),
        "lm_head.weight": head,
    }
    config = {
        "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3", "draft_vocab_size": SIZE,
        "eagle_aux_hidden_state_layer_ids": [2, 5, 7],
        "transformer_layer_config": {**CONFIG, "model_type": "llama"},
    }  # fmt: skip
    return Checkpoint(config, tensors, target.embedding, head)


def block(target: Counting) -> Checkpoint:
    """DeepSpec's layout: the anchor's slot predicts the token after it, from its embedding alone."""
    head = ahead(normed(target.embedding), 1)
    tensors = silent_layer("layers.0", SIZE) | {
        "fc.weight": torch.zeros(SIZE, SIZE),
        "hidden_norm.weight": torch.ones(SIZE),
        "norm.weight": torch.ones(SIZE),
        "lm_head.weight": head,
        **{f"layers.0.self_attn.{name}_norm.weight": torch.ones(16) for name in "qk"},
    }
    config = {
        **CONFIG, "architectures": ["Qwen3DSparkModel"], "block_size": 4, "mask_token_id": 0,
        "markov_rank": 0, "target_layer_ids": [1],
    }  # fmt: skip
    return Checkpoint(config, tensors, target.embedding, head)


@pytest.mark.parametrize(
    ("make", "misread"),
    [(eagle, {"eagle_aux_hidden_state_layer_ids": [3, 6, 8]}), (block, {"sample_from_anchor": False})],
    ids=["layers", "slots"],
)
def test_a_misread_checkpoint_is_told_loudly(make, misread, tmp_path, caplog):
    torch.manual_seed(0)
    target = Counting(tmp_path / "target")
    checkpoint = make(target)
    for change in ({}, misread):
        checkpoint.config |= change
        executor = TorchExecutor(target.model, 20, 16)
        drafter = load_drafter(checkpoint.write(tmp_path / "draft"), executor, target.folder, 200)
        engine = Engine(
            target.model, drafter, "fixed:3", num_pages=20, page_size=16, wrap=lambda _, e=executor: e
        )
        engine.loop.speculation.gamma = drafter.gamma
        caplog.clear()
        with caplog.at_level(logging.WARNING, "dspark"):
            tau = self_check(engine.loop, engine.worker, [3, 4, 5])
        if change:
            assert tau < SUSPICIOUS
            assert "hardly ever accepted" in caplog.text
        else:
            assert tau > 1.9
            assert not caplog.records
