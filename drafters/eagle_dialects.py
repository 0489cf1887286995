"""config.json of Eagle3 draft models as others write it.

| written by | known by | layer ids | layer |
|---|---|---|---|
| DeepSpec | Qwen3Eagle3Model | outputs of layers, from 0 | q and k are normed |
| SpecForge, EAGLE | LlamaForCausalLMEagle3, `eagle_config` | the same | Llama's: they are not |
| speculators | `speculators_model_type` | one more | as `transformer_layer_config` says; switches for norms |

Where no layer ids are given, everybody means the outputs of layers 1, n/2 - 1 and n - 4.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: the class in our own config.json of an Eagle3 model
OURS = "Qwen3Eagle3ChainModel"
_DEEPSPEC = ("Qwen3Eagle3Model", "Eagle3DraftModel")
_LLAMA = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
#: how long chains were trained to be, where config.json does not say
_USUAL_LENGTH = 7
_NORMS = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")


def is_eagle3(architecture: str) -> bool:
    """Whether a class outside the speculators format is a dialect of Eagle3 that we read."""
    return architecture in (*_DEEPSPEC, *_LLAMA)


def unnested_eagle3(raw: Mapping[str, Any], target_layers: int | None) -> dict[str, Any]:
    """DeepSpec's, SpecForge's and EAGLE's, in our form. Raises ValueError."""
    name = raw["architectures"][0]
    inner = raw.get("eagle_config") or {}
    if not inner.get("use_aux_hidden_state", True):
        raise ValueError("Eagle models over the last layer alone (use_aux_hidden_state: false) are not read")
    switches = {key: bool(inner.get(key, raw.get(key, False))) for key in _NORMS}
    ids = raw.get("target_layer_ids") or inner.get("eagle_aux_hidden_state_layer_ids")
    layers = {key: value for key, value in raw.items() if key != "eagle_config"}
    return _one_form(
        layers,
        {**switches, "qk_norm": name in _DEEPSPEC},
        ids or _default_layers(target_layers),
        raw.get("ttt_length") or _USUAL_LENGTH,
        raw,
    )


def speculators_eagle3(raw: Mapping[str, Any], target_layers: int | None) -> dict[str, Any]:
    """The speculators format in our form. Raises ValueError."""
    layers = raw["transformer_layer_config"]
    kind = layers.get("model_type", "llama")
    if kind not in ("llama", "qwen3"):
        raise ValueError(f"draft layers of type {kind!r} are not supported, only llama and qwen3")
    ids = raw.get("eagle_aux_hidden_state_layer_ids")
    return _one_form(
        layers,
        {**{key: bool(raw.get(key, False)) for key in _NORMS}, "qk_norm": kind == "qwen3"},
        [layer - 1 for layer in ids] if ids else _default_layers(target_layers),
        _proposed(raw) or _USUAL_LENGTH,
        raw,
    )


def _one_form(
    layers: Mapping[str, Any], layout: dict[str, bool], ids: list[int], length: int, raw: Mapping[str, Any]
) -> dict[str, Any]:
    if int(layers["num_hidden_layers"]) != 1:
        raise ValueError(
            f"Eagle3 models of {layers['num_hidden_layers']} layers are not supported, only of one"
        )
    if raw.get("target_hidden_size") not in (None, layers["hidden_size"]):
        raise ValueError("a draft model of another width than its target's is not supported")
    draft_vocab = raw.get("draft_vocab_size")
    head_dim = layers.get("head_dim") or int(layers["hidden_size"]) // int(layers["num_attention_heads"])
    return {
        **layers,
        "head_dim": head_dim,  # before a Qwen3 layer's own default can count for a Llama layer
        "architectures": [OURS],
        "chain_layout": layout,
        "target_layer_ids": list(ids),
        "block_size": int(length),
        "mask_token_id": 0,  # chains have no masks
        "markov_rank": 0,
        "enable_confidence_head": False,
        "draft_vocab_size": None if draft_vocab == layers.get("vocab_size") else draft_vocab,
    }


def _default_layers(target_layers: int | None) -> list[int]:
    if target_layers is None:
        raise ValueError("config.json does not say which layers it reads, and the target is not known here")
    return [1, target_layers // 2 - 1, target_layers - 4]


def _proposed(raw: Mapping[str, Any]) -> int | None:
    """How many tokens the speculators format proposes by default."""
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    count = methods[0].get("speculative_tokens")
    return None if count is None else int(count)
