"""TransformersModel with attention handed out reproduces transformers' own eager attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.models.config import ModelConfig, UnsupportedModel
from engine.models.transformers_model import TransformersModel

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES: dict[str, Any] = {
    "phi3": lambda: transformers.Phi3Config(**SMALL, sliding_window=5),
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL, head_dim=16, sliding_window=5, attn_logit_softcapping=2.0, query_pre_attn_scalar=10
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=5),
    "granite": lambda: transformers.GraniteConfig(**SMALL, logits_scaling=3.0, attention_multiplier=0.2),
    "cohere2": lambda: transformers.Cohere2Config(**SMALL, sliding_window=5, logit_scale=0.5),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=96, n_embd=64, n_layer=4, n_head=4, bos_token_id=1, eos_token_id=2
    ),
    "llama": lambda: transformers.LlamaConfig(**SMALL),
}


def causal(
    layer: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Dense attention of one sequence that starts at position 0."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at = torch.arange(len(q))
    behind = at[:, None] - at[None, :]
    seen = behind >= 0
    if window is not None:
        seen &= behind < window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def make(config: Any, folder: Path) -> Any:
    torch.manual_seed(0)
    reference = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in reference.parameters():  # the usual init is too small to tell attention rules apart
            parameter.add_(torch.randn_like(parameter) * 0.1)
    reference.save_pretrained(folder)
    return reference


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_logits_and_features_equal_eager(family: str, tmp_path: Path) -> None:
    reference = make(FAMILIES[family](), tmp_path)
    model = TransformersModel.load(tmp_path)
    tokens = torch.randint(0, 96, (14,))
    theirs = reference(tokens[None], output_hidden_states=True)
    hidden, features = model.forward(tokens, torch.arange(14), causal, feature_layers=(1, -1))
    assert features is not None
    assert features.shape == (14, 128)
    logits = model.logits(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, theirs.logits[0], atol=1e-5, rtol=1e-5)
    expected = torch.cat([theirs.hidden_states[2][0], theirs.hidden_states[0][0]], dim=-1)
    torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-5)


def test_fp64_stays_fp64_and_no_features_unasked(tmp_path: Path) -> None:
    make(FAMILIES["llama"](), tmp_path)
    model = TransformersModel.load(tmp_path, dtype=torch.float64)
    hidden, features = model.forward(torch.arange(3), torch.arange(3), causal)
    assert features is None
    assert model.logits(hidden).dtype == torch.float64


def test_bf16_logits_come_in_fp32(tmp_path: Path) -> None:
    make(FAMILIES["gemma2"](), tmp_path)
    model = TransformersModel.load(tmp_path, dtype=torch.bfloat16)
    hidden, _ = model.forward(torch.arange(3), torch.arange(3), causal)
    assert (hidden.dtype, model.logits(hidden).dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("layer", [3, -2])
def test_feature_layers_out_of_range(layer: int, tmp_path: Path) -> None:
    make(FAMILIES["llama"](), tmp_path)
    model = TransformersModel.load(tmp_path)
    with pytest.raises(ValueError, match="feature layers"):
        model.forward(torch.arange(3), torch.arange(3), causal, feature_layers=(layer,))


def test_attention_that_cannot_be_replaced_is_refused() -> None:
    config = transformers.BloomConfig(vocab_size=96, hidden_size=64, n_layer=2, n_head=4)
    module = transformers.BloomForCausalLM(config)
    with pytest.raises(UnsupportedModel, match="attention"):
        TransformersModel(ModelConfig.from_dict(config.to_dict()), module)


def test_rope_that_varies_with_length_is_refused() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = transformers.LlamaConfig(**SMALL, rope_parameters=scaling)
    parsed = ModelConfig.from_dict(config.to_dict())
    assert not parsed.fused
    with pytest.raises(UnsupportedModel, match="rotary"):
        TransformersModel(parsed, transformers.LlamaForCausalLM(config))


def test_an_output_head_with_unknown_steps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = FAMILIES["llama"]()
    module = transformers.LlamaForCausalLM(config)
    own = module.forward

    def doubled(**kwargs: Any) -> Any:
        output = own(**kwargs)
        output.logits = output.logits * 2
        return output

    monkeypatch.setattr(module, "forward", doubled)
    with pytest.raises(UnsupportedModel, match="output head"):
        TransformersModel(ModelConfig.from_dict(config.to_dict()), module)
