"""The config.json and generation_config.json that a GGUF file's metadata amount to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.models.unsupported import UnsupportedModel

# llama.cpp bakes Llama 3's rope scaling into a tensor of per-frequency divisors. These constants are common
# to every release that uses it; only the factor differs, and it is the largest divisor.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@dataclass(frozen=True, slots=True)
class Architecture:
    """How one GGUF architecture maps to a Hugging Face family. `permuted`: q and k rows are interleaved."""

    model_type: str
    hf_class: str
    permuted: bool


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("llama", "LlamaForCausalLM", True),
    "mistral": Architecture("mistral", "MistralForCausalLM", True),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", False),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", False),
}


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    """Raises UnsupportedModel for an architecture outside ARCHITECTURES."""
    name = str(metadata.get("general.architecture"))
    found = ARCHITECTURES.get(name)
    if found is None:
        raise UnsupportedModel(
            f"GGUF architecture {name!r} is not supported (supported: {', '.join(ARCHITECTURES)}); "
            "use the model's safetensors release"
        )
    window = metadata.get(f"{name}.attention.sliding_window")
    return ARCHITECTURES["mistral"] if name == "llama" and window else found


def build_config(
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    rope_divisors: npt.NDArray[np.float32] | None,
) -> dict[str, Any]:
    """config.json contents.

    `metadata` maps GGUF keys to values, `shapes` tensor names to numpy shapes (rows first), `rope_divisors`
    is the file's rope_freqs tensor [head_dim/2] if there is one. Raises UnsupportedModel.
    """
    prefix = str(metadata.get("general.architecture"))
    arch = architecture_of(metadata)

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"{prefix}.{key}", default)

    if get("expert_count"):
        raise UnsupportedModel("mixture-of-experts GGUF files are not supported")
    heads = _uniform(get("attention.head_count"), "attention.head_count")
    kv_heads = _uniform(get("attention.head_count_kv", heads), "attention.head_count_kv")
    vocab, hidden = shapes["token_embd.weight"]
    head_dim = shapes["blk.0.attn_q.weight"][0] // heads
    if (
        get("rope.dimension_count", head_dim) != head_dim
        or get("attention.value_length", head_dim) != head_dim
    ):
        raise UnsupportedModel(
            "GGUF files with partly rotated heads or unequal key and value sizes are not supported"
        )

    config: dict[str, Any] = {
        "architectures": [arch.hf_class],
        "model_type": arch.model_type,
        "hidden_act": "silu",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": _uniform(get("feed_forward_length"), "feed_forward_length"),
        "num_hidden_layers": int(get("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": int(get("context_length")),
        "rms_norm_eps": _shortest(get("attention.layer_norm_rms_epsilon", 1e-6)),
        "tie_word_embeddings": "output.weight" not in shapes,
        "rope_theta": _shortest(get("rope.freq_base", 10000.0)),
        "dtype": "float32",
    }
    scaling = _rope_scaling(get, config, rope_divisors)
    if scaling is not None:
        config["rope_scaling"] = scaling
    if arch.model_type == "mistral":
        config["sliding_window"] = get("attention.sliding_window")
    elif arch.model_type != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    if arch.model_type in ("llama", "smollm3"):
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in shapes
    for key in ("bos", "eos", "padding"):
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        config[f"{'pad' if key == 'padding' else key}_token_id"] = token
    return config


def build_generation_config(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """generation_config.json contents: every id that ends a text or a turn, and the start and pad ids."""
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return {
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted({int(end) for end in ends if end is not None}),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _uniform(value: Any, key: str) -> int:
    """GGUF allows one value a layer; only equal ones are supported."""
    values = set(value) if isinstance(value, list) else {value}
    if len(values) != 1 or None in values:
        raise UnsupportedModel(f"GGUF metadata {key} is missing or differs between layers")
    return int(values.pop())


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, where the file says 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _rope_scaling(
    get: Any, config: Mapping[str, Any], divisors: npt.NDArray[np.float32] | None
) -> dict[str, Any] | None:
    if divisors is not None:
        return _llama3_scaling(divisors, config["rope_theta"], config["head_dim"])
    kind = get("rope.scaling.type", "none")
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": float(get("rope.scaling.factor", 1.0))}
    if kind == "yarn":
        original = get("rope.scaling.original_context_length", config["max_position_embeddings"])
        scaling["original_max_position_embeddings"] = int(original)
    elif kind != "linear":
        raise UnsupportedModel(f"GGUF rope scaling {kind!r} is not supported")
    return scaling


def _llama3_scaling(divisors: npt.NDArray[np.float32], theta: float, head_dim: int) -> dict[str, Any] | None:
    factor = float(divisors.max())
    if factor == 1.0:
        return None
    frequencies = theta ** (-np.arange(0, head_dim, 2) / head_dim)
    turns = _LLAMA3["original_max_position_embeddings"] * frequencies / (2 * np.pi)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    if divisors.shape != kept.shape or not np.allclose(
        divisors, 1.0 / ((1.0 - kept) / factor + kept), rtol=1e-4
    ):
        raise UnsupportedModel("the rope_freqs tensor of this GGUF file is not Llama 3's scaling")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
