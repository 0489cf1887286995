"""The facts about a target model that execution needs, read from a Hugging Face style config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and switches of a dense decoder.

    `sliding_windows[i]` and `rope_layers[i]` say, per layer, how many keys a query sees (None: all) and
    whether q and k are rotated. `fused` is False for anything the fused decoder does not cover exactly;
    such models run through transformers.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    max_position: int
    tie_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    rope_layers: tuple[bool, ...]
    eos_token_ids: frozenset[int]
    bos_token_id: int | None
    fused: bool
    raw: Mapping[str, Any]
