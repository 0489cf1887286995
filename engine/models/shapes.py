"""What shapes a config gives to its checkpoint's tensors: the two may come from different models."""

from __future__ import annotations

from collections.abc import Mapping

from engine.models.config import ModelConfig
from engine.models.weights import CorruptModel


def check_shapes(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CorruptModel for a tensor of another shape. `shapes` by Hugging Face name, less "model."."""
    wanted = _shapes(config)
    for name, shape in shapes.items():
        stem, _, kind = name.rpartition(".")
        parts = stem.split(".", 2)
        inner = parts[2] if parts[0] == "layers" and len(parts) == 3 else stem
        expected = wanted.get(inner, shape)
        if kind == "bias":
            expected = expected[:1]
        if shape != expected:
            raise CorruptModel(
                f"the tensor {name!r} is {list(shape)}, but config.json makes it {list(expected)}: "
                "they are not of one model"
            )


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Of the weights of a dense decoder, out before in, within a layer or outside."""
    vocab, hidden, wide, dim = (
        config.vocab_size,
        config.hidden_size,
        config.intermediate_size,
        config.head_dim,
    )
    queries, keys = config.num_heads * dim, config.num_kv_heads * dim
    return {
        "embed_tokens": (vocab, hidden),
        "lm_head": (vocab, hidden),
        "norm": (hidden,),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
