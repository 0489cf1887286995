"""Draft checkpoints as other projects store them, tiny and random, and their forward passes, plainly.

The forward passes read tensors under the names that are stored: what our loader makes of them must agree.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, HEADS, KV_HEADS, DIM, INTER, VOCAB, DRAFT_VOCAB = 48, 6, 2, 8, 80, 64, 40
EPS, THETA = 1e-6, 10000.0
TARGET_LAYERS = 10
LAYERS = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INTER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "max_position_embeddings": 512,
    "model_type": "qwen3",
    "tie_word_embeddings": False,
}


def norm_weight(size: int = HIDDEN) -> torch.Tensor:
    return 0.5 + torch.rand(size)


def matrix(rows: int, cols: int) -> torch.Tensor:
    return torch.randn(rows, cols) * 0.25


def layer(
    prefix: str, width: int = HIDDEN, qk_norm: bool = True, hidden_norm: bool = False
) -> dict[str, Any]:
    """A decoder layer's tensors whose q, k and v read `width` inputs."""
    sizes = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
    out = {f"self_attn.{name}_proj.weight": matrix(size, width) for name, size in sizes.items()}
    out["self_attn.o_proj.weight"] = matrix(HIDDEN, HEADS * DIM)
    out |= {f"mlp.{name}_proj.weight": matrix(INTER, HIDDEN) for name in ("gate", "up")}
    out["mlp.down_proj.weight"] = matrix(HIDDEN, INTER)
    norms = ["input_layernorm", "post_attention_layernorm"] + ["hidden_norm"] * hidden_norm
    out |= {f"{name}.weight": norm_weight() for name in norms}
    if qk_norm:
        out |= {f"self_attn.{name}_norm.weight": norm_weight(DIM) for name in "qk"}
    return {f"{prefix}.{name}": value for name, value in out.items()}


@dataclass
class Checkpoint:
    """config.json, tensors, and the target's embedding and head [64, 48] (the draft's own where stored)."""

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    embedding: torch.Tensor
    head: torch.Tensor
    ids: torch.Tensor | None = None
    prefix: str = "layers.0"
    switches: set[str] = field(default_factory=set)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(
            {name: value.contiguous() for name, value in self.tensors.items()}, folder / "model.safetensors"
        )
        return folder

    def used(self, name: str) -> torch.Tensor:
        """Embedding [V, d] or head [V', d] that the checkpoint means."""
        own = self.tensors.get(f"{name}.weight")
        if own is not None:
            return own
        if name == "embed_tokens":
            return self.embedding
        return self.head if self.ids is None else self.head[self.ids]


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
    """x [heads, DIM], halves paired."""
    angles = position * THETA ** (-torch.arange(0, DIM, 2) / DIM)
    a, b = x[:, : DIM // 2], x[:, DIM // 2 :]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def attended(q: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """One query row [HEADS, DIM] over keys and values, each [KV_HEADS, DIM]."""
    out = []
    for head in range(HEADS):
        k = torch.stack([key[head * KV_HEADS // HEADS] for key in keys])
        v = torch.stack([value[head * KV_HEADS // HEADS] for value in values])
        out.append(torch.softmax(k @ q[head] / math.sqrt(DIM), 0) @ v)
    return torch.cat(out)


def mlp(w: dict[str, torch.Tensor], prefix: str, x: torch.Tensor) -> torch.Tensor:
    gate, up = w[f"{prefix}.mlp.gate_proj.weight"] @ x, w[f"{prefix}.mlp.up_proj.weight"] @ x
    return w[f"{prefix}.mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)


def heads(w: dict[str, torch.Tensor], prefix: str, name: str, x: torch.Tensor, position: int) -> torch.Tensor:
    """q or k of one row: projected, normed if the layer norms them, rotated."""
    out = (w[f"{prefix}.self_attn.{name}_proj.weight"] @ x).view(-1, DIM)
    norm = w.get(f"{prefix}.self_attn.{name}_norm.weight")
    return rotated(out if norm is None else rms(out, norm), position)


def eagle_logits(
    checkpoint: Checkpoint, features: torch.Tensor, tokens: list[int], drafted: list[int]
) -> torch.Tensor:
    """[len(drafted), V'] of one chain: features [a, m * d] before the anchor, tokens [a + 1] up to it."""
    w, prefix, on = checkpoint.tensors, checkpoint.prefix, checkpoint.switches
    fused = features
    if "norm_before_fc" in on:
        fused = rms(fused, w["input_norm.weight"])
    if "fc_norm" in on:
        parts = fused.chunk(features.shape[1] // HIDDEN, -1)
        fused = torch.cat([rms(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
    fused = fused @ w["fc.weight"].T
    embedding, head = checkpoint.used("embed_tokens"), checkpoint.used("lm_head")
    anchor, keys, values, out, feedback = len(tokens) - 1, [], [], [], None
    for i in range(anchor + len(drafted) - 1):
        g = fused[i] if i < anchor else feedback
        normed = rms(g, w[f"{prefix}.hidden_norm.weight"])
        token = (tokens + drafted)[i + 1]
        x = torch.cat((rms(embedding[token], w[f"{prefix}.input_layernorm.weight"]), normed))
        keys.append(heads(w, prefix, "k", x, i))
        values.append((w[f"{prefix}.self_attn.v_proj.weight"] @ x).view(-1, DIM))
        if i < anchor - 1:
            continue
        residual = normed if "norm_before_residual" in on else g
        mixed = attended(heads(w, prefix, "q", x, i), keys, values)
        residual = residual + w[f"{prefix}.self_attn.o_proj.weight"] @ mixed
        x = residual + mlp(w, prefix, rms(residual, w[f"{prefix}.post_attention_layernorm.weight"]))
        seen = rms(x, w["norm.weight"])
        feedback = seen if "norm_output" in on else x
        out.append(head @ seen)
    return torch.stack(out)


def block_logits(
    checkpoint: Checkpoint, features: torch.Tensor, block: list[int], previous: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [n, V'], raw confidence [n]) of a block of slots behind a context: features [a, m * d].

    block [n] are the tokens of the slots, masks but for the first; previous [n] the token before each
    prediction. All slots see the context and one another.
    """
    w, start = checkpoint.tensors, len(features)
    context = rms(features @ w["fc.weight"].T, w["hidden_norm.weight"])
    rows = [checkpoint.used("embed_tokens")[token] for token in block]
    for number in range(
        checkpoint.config.get("transformer_layer_config", checkpoint.config)["num_hidden_layers"]
    ):
        prefix = f"layers.{number}"
        normed = [rms(x, w[f"{prefix}.input_layernorm.weight"]) for x in rows]
        seen = [*context, *normed]
        keys = [heads(w, prefix, "k", x, i) for i, x in enumerate(seen)]
        values = [(w[f"{prefix}.self_attn.v_proj.weight"] @ x).view(-1, DIM) for x in seen]
        for j, x in enumerate(normed):
            mixed = attended(heads(w, prefix, "q", x, start + j), keys, values)
            rows[j] = rows[j] + w[f"{prefix}.self_attn.o_proj.weight"] @ mixed
            rows[j] = rows[j] + mlp(w, prefix, rms(rows[j], w[f"{prefix}.post_attention_layernorm.weight"]))
    hidden = torch.stack([rms(x, w["norm.weight"]) for x in rows])
    before = w["markov_head.markov_w1.weight"][previous]
    logits = hidden @ checkpoint.used("lm_head").T + before @ w["markov_head.markov_w2.weight"].T
    proj = w["confidence_head.proj.weight"][0]
    return logits, torch.cat((hidden, before), -1) @ proj + w["confidence_head.proj.bias"]
