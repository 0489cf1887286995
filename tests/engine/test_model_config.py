"""ModelConfig reads what transformers reads, for each family, and refuses what the server cannot run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from engine.models.config import ModelConfig, UnsupportedModel

SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def saved(tmp_path: Path, config: Any) -> ModelConfig:
    config.save_pretrained(tmp_path)
    return ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    "make",
    [
        transformers.LlamaConfig,
        transformers.MistralConfig,
        transformers.Qwen2Config,
        transformers.Qwen3Config,
        transformers.SmolLM3Config,
    ],
)
def test_families_agree_with_transformers(tmp_path: Path, make: Any) -> None:
    theirs = make(**SMALL)
    ours = saved(tmp_path, theirs)
    assert ours.fused
    assert ours.model_type == theirs.model_type
    assert (ours.hidden_size, ours.intermediate_size, ours.num_layers) == (64, 96, 4)
    assert (ours.num_heads, ours.num_kv_heads, ours.vocab_size) == (4, 2, 128)
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.rope_scaling is None
    assert ours.rms_eps == theirs.rms_norm_eps
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.qkv_bias == (theirs.model_type == "qwen2")
    assert not ours.output_bias
    assert ours.qk_norm == (theirs.model_type == "qwen3")
    windows = (4096,) * 4 if theirs.model_type == "mistral" else (None,) * 4
    assert ours.sliding_windows == windows
    assert ours.rope_layers == ((True, True, True, False) if theirs.model_type == "smollm3" else (True,) * 4)


def test_left_out_keys_take_the_family_defaults() -> None:
    raw = {**SMALL, "model_type": "smollm3"}
    config = ModelConfig.from_dict(raw)
    assert config.rope_theta == 2000000.0
    assert config.tie_embeddings
    assert ModelConfig.from_dict({**SMALL, "model_type": "qwen3"}).head_dim == 128
    assert ModelConfig.from_dict({**SMALL, "model_type": "mistral"}).sliding_windows == (4096,) * 4


def test_attention_bias_of_llama_covers_all_four_projections() -> None:
    config = ModelConfig.from_dict({**SMALL, "model_type": "llama", "attention_bias": True, "mlp_bias": True})
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, True, True)


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scaled_rope_in_old_and_new_spelling(key: str) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    raw: dict[str, Any] = {**SMALL, "model_type": "llama", "max_position_embeddings": 4096}
    raw[key] = {**scaling, "rope_theta": 5e5} if key == "rope_parameters" else scaling
    raw.setdefault("rope_theta", 5e5 if key == "rope_scaling" else None)
    config = ModelConfig.from_dict(raw)
    assert config.fused
    assert config.rope_theta == 5e5
    assert config.rope_scaling == {**scaling, "original_max_position_embeddings": 4096}


def test_old_type_key_and_rope_that_is_not_fused() -> None:
    raw = {**SMALL, "model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert ModelConfig.from_dict(raw).rope_scaling == {"rope_type": "linear", "factor": 2.0}
    raw["rope_scaling"] = {"type": "yarn", "factor": 2.0}
    assert not ModelConfig.from_dict(raw).fused


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"quantization_config": {"quant_method": "gptq"}},
        {"partial_rotary_factor": 0.5},
    ],
)
def test_what_the_fused_decoder_does_not_cover(change: dict[str, Any]) -> None:
    assert not ModelConfig.from_dict({**SMALL, "model_type": "llama", **change}).fused


def test_windows_of_qwen2() -> None:
    raw: dict[str, Any] = {**SMALL, "model_type": "qwen2", "sliding_window": 8, "max_window_layers": 3}
    assert ModelConfig.from_dict(raw).sliding_windows == (None,) * 4
    raw["use_sliding_window"] = True
    assert ModelConfig.from_dict(raw).sliding_windows == (None, None, None, 8)
    raw["layer_types"] = ["sliding_attention", "full_attention"] * 2
    assert ModelConfig.from_dict(raw).sliding_windows == (8, None, 8, None)


def test_windows_of_smollm3_follow_transformers(tmp_path: Path) -> None:
    theirs = transformers.SmolLM3Config(**SMALL, use_sliding_window=True, sliding_window=8)
    expected = tuple(8 if kind == "sliding_attention" else None for kind in theirs.layer_types)
    assert saved(tmp_path, theirs).sliding_windows == expected
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["layer_types"], raw["no_rope_layers"]
    assert ModelConfig.from_dict(raw).sliding_windows == expected


def test_eos_ids_are_the_union_of_both_files(tmp_path: Path) -> None:
    raw = {**SMALL, "model_type": "llama", "eos_token_id": 2}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2], "bos_token_id": 1}))
    config = ModelConfig.from_folder(tmp_path)
    assert config.eos_token_ids == {2, 7}
    assert config.bos_token_id == 1


def test_other_families_take_their_facts_from_transformers(tmp_path: Path) -> None:
    gemma = saved(tmp_path, transformers.Gemma2Config(**SMALL, head_dim=16, sliding_window=8))
    assert not gemma.fused
    assert gemma.sliding_windows == (8, None, 8, None)
    gpt2 = ModelConfig.from_dict({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4})
    assert (gpt2.hidden_size, gpt2.num_layers, gpt2.num_heads, gpt2.num_kv_heads) == (64, 2, 4, 4)
    assert gpt2.vocab_size == 50257


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_local_experts": 8}, "mixture-of-experts"),
        ({"num_experts": 4}, "mixture-of-experts"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, "linear_attention"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"vision_config": {"hidden_size": 8}}, "multimodal"),
        ({"architectures": ["BertForMaskedLM"]}, "not a causal language model"),
        ({"num_kv_shared_layers": 2}, "share"),
        ({"model_type": "no_such_model"}, "not known"),
        ({"model_type": "mixtral"}, "mixture-of-experts"),
        ({"num_hidden_layers": None}, "config.json lacks"),
    ],
)
def test_refusals_say_what_is_not_supported(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        ModelConfig.from_dict({"model_type": "llama", **SMALL, **change})


def test_zero_experts_is_a_dense_model() -> None:
    assert ModelConfig.from_dict({"model_type": "llama", **SMALL, "num_experts": 0}).fused


def test_broken_json_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": 5},
        {"head_dim": -8},
        {"hidden_size": 0},
        {"vocab_size": -1},
        {"num_hidden_layers": 0},
        {"max_position_embeddings": -1},
        {"max_position_embeddings": "long"},
        {"rope_parameters": 3},
        {"rope_scaling": [1]},
        {"eos_token_id": "x"},
        {"architectures": 7},
    ],
)
def test_values_that_no_model_can_have_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    config = {"model_type": "llama", **SMALL, "num_key_value_heads": 2, **change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)
