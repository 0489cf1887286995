"""config.json of draft models as others write it, brought into one form: DeepSpec's keys and a few more.

| written by | known by | layer ids | slots |
|---|---|---|---|
| DeepSpec | Qwen3DSparkModel | outputs of layers, from 0 | the anchor's predicts as well |
| z-lab | DFlashDraftModel, `dflash_config` | the same | the anchor's predicts nothing |
| SpecForge | DSparkDraftModel, `dflash_config` | the same | the anchor's predicts, or as `shift_label` says |
| speculators | `speculators_model_type` | one more | as `sample_from_anchor` says; absent: as z-lab |

A wrong guess about slots or layers crashes nothing: drafts are just never accepted. Eagle3's dialects:
`drafters.eagle_dialects`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from drafters.eagle_dialects import is_eagle3, speculators_eagle3, unnested_eagle3

#: the class in DeepSpec's config.json
DEEPSPEC = "Qwen3DSparkModel"
_ZLAB, _SPECFORGE = "DFlashDraftModel", "DSparkDraftModel"
_HEADS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


def in_one_form(raw: Mapping[str, Any], target_layers: int | None = None) -> dict[str, Any]:
    """A config.json with DeepSpec's keys; `target_layers` is what default layer ids are counted from.

    Raises ValueError for kinds that we do not run, and says so.
    """
    name = str((raw.get("architectures") or [DEEPSPEC])[0])
    if name.startswith("Gemma"):
        raise ValueError(
            f"{name}: draft models for Gemma are not supported, only those for Qwen3 and Llama are"
        )
    if "dspark_block_size" in raw or str(raw.get("model_type", "")).startswith("deepseek"):
        raise ValueError("draft models inside DeepSeek checkpoints (MoE layers, mtp.*) are not supported")
    if raw.get("speculators_model_type") == "eagle3":
        return speculators_eagle3(raw, target_layers)
    if "speculators_model_type" in raw:
        return _speculators(raw)
    if is_eagle3(name):
        return unnested_eagle3(raw, target_layers)
    if name in (_ZLAB, _SPECFORGE):
        return _dflash_config(raw, name)
    return dict(raw)


def _dflash_config(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    inner = {**{key: raw[key] for key in _HEADS if key in raw}, **raw.get("dflash_config", {})}
    kind = inner.pop("projector_type", "dspark" if name == _SPECFORGE else "dflash")
    if kind not in ("dspark", "dflash"):
        raise ValueError(f"projector_type {kind!r} is not supported, only dspark and dflash are")
    if inner.get("causal"):
        raise ValueError("blocks whose slots see only those before them (causal) are not supported")
    if "use_confidence_head" in inner:
        inner["enable_confidence_head"] = inner.pop("use_confidence_head")
    from_anchor = inner.pop("shift_label", kind == "dspark")
    return {
        **raw,
        "sample_from_anchor": from_anchor,
        **inner,
        "architectures": [DEEPSPEC],
        "draft_vocab_size": _reduced(raw.get("draft_vocab_size"), raw),
    }


def _speculators(raw: Mapping[str, Any]) -> dict[str, Any]:
    kind = raw["speculators_model_type"]
    if kind not in ("dspark", "dflash"):
        raise ValueError(
            f"speculators_model_type {kind!r} is not supported, only dspark, dflash and eagle3 are"
        )
    if raw.get("projector_type", "dflash") != "dflash":
        raise ValueError(f"projector_type {raw['projector_type']!r} is not supported")
    layers = raw["transformer_layer_config"]
    if layers.get("model_type", "qwen3") != "qwen3":
        raise ValueError(f"block draft layers of type {layers['model_type']!r} are not supported, only qwen3")
    if raw.get("target_hidden_size") not in (None, layers["hidden_size"]):
        raise ValueError("a draft model of another width than its target's is not supported")
    if "sliding_attention" in (layers.get("layer_types") or ()) and not raw.get("sliding_window_non_causal"):
        raise ValueError("sliding attention that is causal within the block is not supported")
    ids = raw["aux_hidden_state_layer_ids"]
    if ids is None:
        raise ValueError("config.json does not say which layers it reads: aux_hidden_state_layer_ids is null")
    if raw.get("mask_token_id", 0) is None:
        raise ValueError("config.json does not say what masks a slot: mask_token_id is null")
    return {
        **layers,
        **{key: raw[key] for key in (*_HEADS, "block_size", "mask_token_id") if key in raw},
        "architectures": [DEEPSPEC],
        "target_layer_ids": [layer - 1 for layer in ids],
        "sample_from_anchor": raw.get("sample_from_anchor", bool(raw.get("shift_label"))),
        "draft_vocab_size": _reduced(raw.get("draft_vocab_size"), layers),
    }


def _reduced(draft_vocab: int | None, layers: Mapping[str, Any]) -> int | None:
    """None where the draft vocabulary is the whole one."""
    return None if draft_vocab == layers.get("vocab_size") else draft_vocab
