"""A weight that is no number: whom it touches fails and says so, and nobody else notices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine.batch import VerificationBatch
from engine.models.config import ModelConfig
from engine.models.decoder import FusedDecoder
from engine.native.loader import supported
from engine.native.weights import Rows, as_bf16
from engine.native_executor import NativeExecutor
from engine.torch_executor import TorchExecutor
from tests.engine.harness import Engine, GuessDrafter, one_thread  # noqa: F401
from tests.engine.test_forward import item
from tests.engine.test_native import BLOCK, tiny

Weights = tuple[ModelConfig, dict[str, torch.Tensor]]

#: the token whose embedding is no number
BAD = 11
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
EXECUTORS = ["torch", *(f"native-{name}" for name in supported())]


def spoilt(family: str = "llama", token: int = BAD) -> Weights:
    """A tiny model whose embedding of one token is no number."""
    config, tensors = tiny(family)
    embedding = tensors["model.embed_tokens.weight"].clone()
    embedding[token, 3] = torch.nan
    return config, {**tensors, "model.embed_tokens.weight": embedding}


def engine(which: str, weights: Weights, pages: int = 40, **how: Any) -> Engine:
    config, tensors = weights

    def wrap(executor: TorchExecutor) -> Any:
        if which == "torch":
            return executor
        kernels = which.removeprefix("native-")
        return NativeExecutor(config, as_bf16(tensors.items()), pages, 1, 512, kernels)

    model = FusedDecoder(config, tensors.items(), torch.float64)
    return Engine(model, num_pages=pages, page_size=16, max_model_len=200, wrap=wrap, **how)


def prompt(size: int, seed: int = 0) -> list[int]:
    """Without the bad token."""
    tokens = np.random.default_rng(seed).integers(3, 64, size)
    return np.where(tokens == BAD, 12, tokens).tolist()


def healthy(which: str, prompts: Sequence[Sequence[int]], family: str = "llama") -> list[list[int]]:
    """What a model without a fault says, one after another."""
    out = []
    for each in prompts:
        alone = engine(which, tiny(family))
        alone.add("a", each, max_tokens=10, **GREEDY)
        alone.run()
        out.append(alone.outputs["a"][0].tokens)
    return out


@pytest.mark.parametrize("which", EXECUTORS)
def test_who_meets_a_bad_token_fails_beside_others_and_after_them(which):
    prompts = [prompt(40, seed) for seed in range(4)]
    wanted = healthy(which, prompts)
    meeting = [*prompt(25, 9), BAD, *prompt(30, 8)]
    # Few pages: what the failed request wrote is overwritten, but not all of it at once.
    served = engine(which, spoilt(), pages=24, token_budget=20)
    for turn in range(3):
        served.add(f"bad {turn}", meeting, max_tokens=10, **GREEDY)
        for index, each in enumerate(prompts):
            if BAD not in wanted[index]:
                served.add(f"{turn} {index}", each, max_tokens=10, **GREEDY)
        served.run()
        (bad,) = served.outputs[f"bad {turn}"]
        assert (bad.finish, bad.tokens) == ("error", [])
        assert "not finite" in bad.error
        for index in range(4):
            if BAD not in wanted[index]:
                assert served.outputs[f"{turn} {index}"][0].tokens == wanted[index]
    assert len(served.outputs) > 6


@pytest.mark.parametrize("which", EXECUTORS)
def test_a_text_that_comes_to_a_bad_token_ends_there(which):
    """The token before it was right, and is kept."""
    prompts = [prompt(20, seed) for seed in range(8)]
    first, whole, at = next(
        (first, whole, at)
        for first, whole in zip(prompts, healthy(which, prompts), strict=True)
        for at in range(1, 9)
        if whole[at] not in whole[:at] + first
    )
    served = engine(which, spoilt(token=whole[at]))
    served.add("a", first, max_tokens=10, **GREEDY)
    served.run()
    (output,) = served.outputs["a"]
    assert output.tokens == whole[: at + 1]
    assert output.finish == "error"


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("which", EXECUTORS)
def test_the_page_before_a_bad_token_is_as_good_as_ever(which, family):
    """Both are computed in one chunk, and the page is found before the fault has shown."""
    shared = prompt(16, 3)
    follower = shared + prompt(12, 4)
    (wanted,) = healthy(which, [follower], family)
    assert BAD not in wanted
    served = engine(which, spoilt(family), token_budget=15)
    served.add("bad", [*shared, BAD, *prompt(20, 5)], max_tokens=4, **GREEDY)
    served.step()
    served.step()  # from the last token of the page on
    active = served.add("follower", follower, max_tokens=10, **GREEDY)
    served.run()
    assert active.usage.cached_tokens == 16
    assert served.outputs["bad"][0].finish == "error"
    assert served.outputs["follower"][0].tokens == wanted


@pytest.mark.parametrize("which", EXECUTORS)
@pytest.mark.parametrize("lead", range(4))
def test_a_bad_token_that_is_only_drafted_ends_nobody(which, lead):
    """It is verified beside rows that come before it, and rejected."""
    first = prompt(20, 2)
    (wanted,) = healthy(which, [first])
    assert BAD not in wanted
    text = first + wanted

    def guess(tokens: list[int], slots: int) -> list[int]:
        right = text[len(tokens) :][:lead]
        return ([*right] + [BAD] * slots)[:slots]

    served = engine(which, spoilt(), drafter=GuessDrafter(guess), policy="fixed:4")
    served.add("a", first, max_tokens=10, **GREEDY)
    served.run()
    (output,) = served.outputs["a"]
    assert output.finish == "length"
    assert output.tokens == wanted


# ---- a fault in a layer: every row meets it


MATRICES = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
MATRICES += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


def shows(executor: Any) -> bool:
    tokens = np.asarray(prompt(37), dtype=np.int32)
    batch = VerificationBatch((item(tokens, 0, 37, range(3)),))
    return not bool(executor.forward(batch).logits.amax(-1).isfinite().any())


@pytest.mark.parametrize("name", [*MATRICES, "input_layernorm", "post_attention_layernorm", "lm_head"])
def test_no_fault_in_a_layer_goes_unnoticed_in_torch(name):
    config, tensors = tiny("llama")
    key = f"model.layers.0.{name}.weight" if name != "lm_head" else "lm_head.weight"
    tensors = {**tensors, key: tensors[key].clone()}
    tensors[key][..., 5] = torch.nan
    assert shows(TorchExecutor(FusedDecoder(config, tensors.items(), torch.float32), 3, 16))


@pytest.mark.parametrize("kernels", supported())
@pytest.mark.parametrize("kind", ["BF16", *BLOCK])
@pytest.mark.parametrize("name", [*MATRICES, "lm_head"])
def test_no_fault_in_a_layer_goes_unnoticed_in_the_kernels(name, kind, kernels):
    import gguf

    config, tensors = tiny("llama")
    weights = as_bf16(tensors.items())
    for key, value in weights.items():
        if kind != "BF16" and isinstance(value, Rows) and key != "embed_tokens.weight":
            full = tensors.get(f"model.{key}", tensors.get(key))
            rows = gguf.quantize(full.numpy(), gguf.GGMLQuantizationType[kind])
            weights[key] = Rows(kind, np.ascontiguousarray(rows).view(np.uint8), value.cols)
    key = f"layers.0.{name}.weight" if name != "lm_head" else "lm_head.weight"
    spoilt = weights[key]
    assert isinstance(spoilt, Rows)
    data = spoilt.data.copy()
    # One weight in bf16, or the scale of one block in fp16.
    data[6, :2] = np.array([torch.nan], dtype=np.float16).view(np.uint8) if kind != "BF16" else (0xC0, 0x7F)
    weights[key] = Rows(spoilt.format, data, spoilt.cols)
    assert shows(NativeExecutor(config, weights, 3, 1, 64, kernels))


@pytest.mark.parametrize("kernels", supported())
@pytest.mark.parametrize("name", ["input_layernorm", "post_attention_layernorm"])
def test_no_fault_in_a_norm_goes_unnoticed_in_the_kernels(name, kernels):
    config, tensors = tiny("llama")
    weights = as_bf16(tensors.items())
    key = f"layers.0.{name}.weight"
    weights[key] = weights[key].copy()
    weights[key][5] = np.nan
    assert shows(NativeExecutor(config, weights, 3, 1, 64, kernels))
