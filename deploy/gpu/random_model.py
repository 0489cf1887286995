"""A model of a given shape with random weights on disk, and a draft model for it: for measuring speed alone.

Every layer has the same random weights, which costs as much to compute as different ones and little to make.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

QWEN3_8B: Mapping[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
#: DeepSpec's draft model for Qwen3-8B
DSPARK: Mapping[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "num_hidden_layers": 5,
    "block_size": 7,
    "mask_token_id": 151669,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "num_target_layers": 36,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def write_target(folder: Path, shape: Mapping[str, Any], tokenizer: Path, device: torch.device) -> Path:
    """A model folder; its tokenizer is copied from another model's and may know fewer tokens."""
    folder.mkdir(parents=True)
    vocab, hidden = shape["vocab_size"], shape["hidden_size"]
    _write_layers(folder, shape, "model.layers", device)
    outer = {
        "model.embed_tokens.weight": _random(device, vocab, hidden),
        "lm_head.weight": _random(device, vocab, hidden),
        "model.norm.weight": _ones(hidden),
    }
    save_file(outer, folder / "outer.safetensors")
    (folder / "config.json").write_text(json.dumps(dict(shape)), encoding="utf-8")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    return folder


def write_draft(
    folder: Path, shape: Mapping[str, Any], heads: Mapping[str, Any], device: torch.device
) -> Path:
    """A DSpark model in DeepSpec's layout for that target, without embedding and head."""
    folder.mkdir(parents=True)
    config = {**shape, **heads}
    vocab, hidden, rank = config["vocab_size"], config["hidden_size"], config["markov_rank"]
    _write_layers(folder, config, "layers", device)
    outer = {
        "fc.weight": _random(device, hidden, len(config["target_layer_ids"]) * hidden),
        "hidden_norm.weight": _ones(hidden),
        "norm.weight": _ones(hidden),
        "markov_head.markov_w1.weight": _random(device, vocab, rank),
        "markov_head.markov_w2.weight": _random(device, vocab, rank),
        "confidence_head.proj.weight": _random(device, 1, hidden + rank),
        "confidence_head.proj.bias": torch.zeros(1, dtype=torch.bfloat16),
    }
    save_file(outer, folder / "outer.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _write_layers(folder: Path, shape: Mapping[str, Any], prefix: str, device: torch.device) -> None:
    hidden, inner, dim = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    queries, keys = shape["num_attention_heads"] * dim, shape["num_key_value_heads"] * dim
    layer = {
        "input_layernorm": _ones(hidden),
        "post_attention_layernorm": _ones(hidden),
        "self_attn.q_norm": _ones(dim),
        "self_attn.k_norm": _ones(dim),
        "self_attn.q_proj": _random(device, queries, hidden),
        "self_attn.k_proj": _random(device, keys, hidden),
        "self_attn.v_proj": _random(device, keys, hidden),
        "self_attn.o_proj": _random(device, hidden, queries),
        "mlp.gate_proj": _random(device, inner, hidden),
        "mlp.up_proj": _random(device, inner, hidden),
        "mlp.down_proj": _random(device, hidden, inner),
    }
    for number in range(shape["num_hidden_layers"]):
        named = {f"{prefix}.{number}.{name}.weight": value for name, value in layer.items()}
        save_file(named, folder / f"layer-{number:03d}.safetensors")


def _random(device: torch.device, rows: int, cols: int) -> torch.Tensor:
    return torch.empty(rows, cols, dtype=torch.bfloat16, device=device).normal_(std=0.02).cpu()


def _ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)
