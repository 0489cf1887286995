"""Which models this server refuses, and the words that it refuses them with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class UnsupportedModel(ValueError):
    """The model is readable but of a kind that this server does not run; the message says which."""


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
_LATENT = ("kv_lora_rank", "q_lora_rank")
_OTHER_MODALITIES = ("vision_config", "audio_config", "text_config", "vision_tower", "mm_vision_tower")
_RECURRENT = (
    "linear_num_value_heads",
    "linear_attn_config",
    "hybrid_override_pattern",
    "layers_block_type",
    "attn_layer_period",
    "ssm_cfg",
    "mamba_d_state",
    "mamba_d_ssm",
    "state_size",
    "block_types",
)
_ATTENTION_KINDS = ("full_attention", "sliding_attention")
_DECODER_SUFFIXES = ("ForCausalLM", "LMHeadModel")


def refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel if `raw` (a parsed config.json) is not a dense, text-only, causal decoder."""
    name = raw.get("model_type") or "(no model_type)"

    def refuse(kind: str) -> None:
        raise UnsupportedModel(
            f"model type {name!r}: {kind}; this server runs dense decoder-only text models"
        )

    if raw.get("is_encoder_decoder"):
        refuse("encoder-decoder models are not supported")
    for key in _OTHER_MODALITIES:
        if raw.get(key):
            refuse(f"multimodal models are not supported (config.json has {key})")
    for key in _EXPERTS:
        value = raw.get(key)
        if isinstance(value, list | tuple):
            value = max(value, default=0)
        if value and int(value) > 1:
            refuse(f"mixture-of-experts models are not supported (config.json has {key}: {value})")
    for key in _LATENT:
        if raw.get(key):
            refuse(f"multi-head latent attention (MLA) is not supported (config.json has {key})")
    for kind in sorted(set(map(str, raw.get("layer_types") or ())) - set(_ATTENTION_KINDS)):
        refuse(f"layers of type {kind!r} are not supported (hybrid and linear-attention models)")
    for key in _RECURRENT:
        if raw.get(key):
            refuse(
                f"hybrid, linear-attention and state-space models are not supported (config.json has {key})"
            )
    if raw.get("num_kv_shared_layers"):
        refuse("layers that share another layer's keys and values are not supported")
    architectures = raw.get("architectures") or ()
    if architectures and not any(str(a).endswith(_DECODER_SUFFIXES) for a in architectures):
        refuse(f"architecture {', '.join(map(str, architectures))} is not a causal language model")
