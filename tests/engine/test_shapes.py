"""A config and weights that are not of one model are refused when they are loaded, not served wrongly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from engine.models.decoder import FusedDecoder
from engine.models.shapes import check_shapes
from engine.models.weights import CorruptModel
from engine.native.loader import supported
from engine.native.weights import as_bf16
from engine.native_executor import NativeExecutor
from tests.engine.test_native import FAMILIES, tiny

OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"vocab_size": 40}, "embed_tokens"),
    ({"vocab_size": 100}, "embed_tokens"),
    ({"hidden_size": 128}, "embed_tokens"),
    ({"num_heads": 8}, "q_proj"),
    ({"num_kv_heads": 4}, "k_proj"),
    ({"head_dim": 64}, "q_proj"),
    ({"intermediate_size": 64}, "gate_proj"),
    ({"intermediate_size": 128}, "gate_proj"),
]


@pytest.mark.parametrize(("change", "name"), OTHERS)
@pytest.mark.parametrize("executor", ["torch", *["native"] * bool(supported())])
def test_weights_of_another_model_are_refused(change, name, executor):
    config, tensors = tiny("llama")
    other = replace(config, **change)

    def load() -> object:
        if executor == "torch":
            return FusedDecoder(other, tensors.items(), torch.float32)
        return NativeExecutor(other, as_bf16(tensors.items()), 8, 1, 64)

    with pytest.raises(CorruptModel, match=rf"{name}.*not of one model"):
        load()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_of_a_model_is_known(family):
    config, tensors = tiny(family)
    shapes = {name.removeprefix("model."): tuple(value.shape) for name, value in tensors.items()}
    check_shapes(config, shapes)
    for name, shape in shapes.items():
        with pytest.raises(CorruptModel, match=name):
            check_shapes(config, {**shapes, name: (shape[0] + 1, *shape[1:])})
    check_shapes(config, {"layers.0": (1,), "layers.0.rotary.inv_freq": (3,), "something.weight": (5, 5)})
