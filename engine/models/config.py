"""The facts about a target model that execution needs, read from a Hugging Face style config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.models.families import FAMILIES, resolve_other_family
from engine.models.unsupported import UnsupportedModel, refuse_unsupported

__all__ = ["ModelConfig", "UnsupportedModel"]

_FUSED_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and switches of a dense decoder.

    `sliding_windows[i]` and `rope_layers[i]` say, per layer, how many keys a query sees (None: all) and
    whether q and k are rotated. `rope_scaling` is None for plain rotary embeddings, else a mapping with
    `rope_type` and that type's parameters. `fused` is False for anything the fused decoder does not cover
    exactly; such models run through transformers.
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

    @classmethod
    def from_folder(cls, folder: Path | str) -> ModelConfig:
        """Read `folder`/config.json and, where there is one, generation_config.json.

        Raises FileNotFoundError without a config.json, ValueError for one that is not a JSON object, and
        UnsupportedModel for a model that this server does not run.
        """
        folder = Path(folder)
        generation = folder / "generation_config.json"
        raw = _read_object(folder / "config.json")
        ends = _read_object(generation) if generation.is_file() else None
        try:
            return cls.from_dict(raw, ends)
        except UnsupportedModel:
            raise
        except (ValueError, TypeError, AttributeError, LookupError) as error:  # values that no config has
            raise UnsupportedModel(f"{folder / 'config.json'} is not understood: {error}") from error

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Parse the contents of config.json; `generation` adds the end-of-text ids of generation_config.json.

        Raises UnsupportedModel for a model that this server does not run or whose config lacks a shape.
        """
        refuse_unsupported(raw)
        model_type = str(raw.get("model_type") or "")
        family = FAMILIES.get(model_type)
        if family is None:
            full = resolve_other_family(model_type, raw)
            refuse_unsupported(full)
        else:
            full = {**family.defaults, **raw}

        try:
            layers = int(full["num_hidden_layers"])
            heads = int(full["num_attention_heads"])
            hidden = int(full["hidden_size"])
            vocab = int(full["vocab_size"])
            intermediate = int(full.get("intermediate_size") or 4 * hidden)
        except (KeyError, TypeError, ValueError) as error:
            raise UnsupportedModel(
                f"model type {model_type!r}: config.json lacks or misstates {error}"
            ) from None
        kv_heads = int(full.get("num_key_value_heads") or heads)
        head_dim = int(full.get("head_dim") or (hidden // heads if heads > 0 else 0))
        max_position = int(full.get("max_position_embeddings") or 2048)
        sizes = (layers, heads, kv_heads, head_dim, hidden, intermediate, vocab, max_position)
        if min(sizes) < 1 or heads % kv_heads:
            raise UnsupportedModel(f"model type {model_type!r}: config.json has sizes that no model can have")
        theta, scaling = _rope(full)
        bias = bool(full.get("attention_bias", False))
        rope_type = "default" if scaling is None else scaling["rope_type"]
        eos = _ids(raw.get("eos_token_id")) | _ids((generation or {}).get("eos_token_id"))
        bos = _ids(raw.get("bos_token_id")) or _ids((generation or {}).get("bos_token_id"))
        return cls(
            architecture=str((full.get("architectures") or [model_type])[0]),
            model_type=model_type,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_eps=float(full.get("rms_norm_eps") or 1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_position=max_position,
            tie_embeddings=bool(full.get("tie_word_embeddings", False)),
            qkv_bias=bias or (family is not None and family.qkv_bias),
            output_bias=bias and not (family is not None and family.qkv_bias),
            mlp_bias=bool(full.get("mlp_bias", False)),
            qk_norm=family is not None and family.qk_norm,
            sliding_windows=_sliding_windows(model_type, full, layers),
            rope_layers=_rope_layers(model_type, full, layers),
            eos_token_ids=eos,
            bos_token_id=min(bos, default=None),
            fused=family is not None
            and full.get("hidden_act") == "silu"
            and rope_type in _FUSED_ROPE_TYPES
            and float(_rope_value(full, "partial_rotary_factor", 1.0)) == 1.0
            and not raw.get("quantization_config"),
            raw=raw,
        )


def _read_object(path: Path) -> dict[str, Any]:
    try:
        parsed = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"{path} does not hold a JSON object")
    return parsed


def _ids(value: Any) -> frozenset[int]:
    if value is None:
        return frozenset()
    return frozenset(int(v) for v in (value if isinstance(value, list | tuple) else [value]))


def _rope_parameters(full: Mapping[str, Any]) -> Mapping[str, Any]:
    """rope_parameters (transformers 5) or rope_scaling; of one per layer type, that of full attention."""
    found = full.get("rope_parameters") or full.get("rope_scaling") or {}
    per_layer_type = found.get("full_attention")
    return per_layer_type if isinstance(per_layer_type, Mapping) else found


def _rope_value(full: Mapping[str, Any], key: str, default: Any) -> Any:
    value = _rope_parameters(full).get(key)
    if value is None:
        value = full.get(key)
    return default if value is None else value


def _rope(full: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling), the latter None for unscaled rotary embeddings."""
    theta = float(_rope_value(full, "rope_theta", 10000.0))
    scaling = {k: v for k, v in _rope_parameters(full).items() if k not in ("rope_theta", "type")}
    scaling["rope_type"] = scaling.get("rope_type") or _rope_parameters(full).get("type") or "default"
    if scaling["rope_type"] == "default":
        return theta, None
    if scaling["rope_type"] == "llama3":
        limit = full.get("original_max_position_embeddings") or full.get("max_position_embeddings")
        scaling.setdefault("original_max_position_embeddings", limit)
    return theta, scaling


def _sliding_windows(model_type: str, full: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = full.get("sliding_window")
    # Llama's own code ignores a window; the families with a switch ignore one that is switched off.
    if not window or model_type == "llama" or not full.get("use_sliding_window", True):
        return (None,) * layers
    window = int(window)
    kinds = full.get("layer_types")
    if model_type == "mistral" or (kinds is None and model_type not in ("qwen2", "qwen3", "smollm3")):
        return (window,) * layers
    if kinds is not None:
        return tuple(window if kinds[i] == "sliding_attention" else None for i in range(layers))
    if model_type == "smollm3":
        return tuple(None if rotated else window for rotated in _rope_layers(model_type, full, layers))
    full_below = int(full["max_window_layers"])
    return tuple(window if i >= full_below else None for i in range(layers))


def _rope_layers(model_type: str, full: Mapping[str, Any], layers: int) -> tuple[bool, ...]:
    if model_type != "smollm3":
        return (True,) * layers
    rotated = full.get("no_rope_layers")  # despite its name, 1 means that the layer rotates
    if rotated is None:
        interval = int(full["no_rope_layer_interval"])
        return tuple((i + 1) % interval != 0 for i in range(layers))
    return tuple(bool(rotated[i]) for i in range(layers))
