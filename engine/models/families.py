"""The model families that the fused decoder covers, and how the facts of any other family are found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.unsupported import UnsupportedModel


@dataclass(frozen=True, slots=True)
class Family:
    """What a model type implies beyond config.json. `defaults` stand in for keys that a config leaves out."""

    defaults: Mapping[str, Any]
    qkv_bias: bool = False
    qk_norm: bool = False


_QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}

FAMILIES: Mapping[str, Family] = {
    "llama": Family({"hidden_act": "silu"}),
    "mistral": Family({"hidden_act": "silu", "sliding_window": 4096, "num_key_value_heads": 8}),
    "qwen2": Family({"hidden_act": "silu", **_QWEN_WINDOW}, qkv_bias=True),
    "qwen3": Family({"hidden_act": "silu", "head_dim": 128, **_QWEN_WINDOW}, qk_norm=True),
    "smollm3": Family(
        {
            "hidden_act": "silu",
            "use_sliding_window": False,
            "no_rope_layer_interval": 4,
            "rope_theta": 2000000.0,
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
        }
    ),
}

# Names under which transformers offers the same fact of every family, whatever config.json calls it.
_FACTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
)


def resolve_other_family(model_type: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a family outside FAMILIES with transformers' defaults and standard names filled in.

    Imports transformers (slow), which such a model needs anyway. Raises UnsupportedModel for a model type
    that transformers does not know: its own code, if the repository brings some, is never run.
    """
    import transformers

    if model_type not in transformers.CONFIG_MAPPING:
        raise UnsupportedModel(
            f"model type {model_type!r} is not known to transformers {transformers.__version__}; "
            "code that comes with a model is never run"
        )
    arguments = {k: v for k, v in raw.items() if k not in ("model_type", "transformers_version")}
    config = transformers.AutoConfig.for_model(model_type, **arguments)
    full: dict[str, Any] = config.to_dict()
    for fact in _FACTS:
        value = getattr(config, fact, None)
        if value is not None:
            full[fact] = value
    return full
