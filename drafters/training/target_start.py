"""A fresh draft model begins as the target's last layers, over the last of the features that it reads.

What the target's next layers make of that feature is most of what its head will read, so this is nearer to
the goal than noise, and nothing but a starting point: every weight is trained. The draft model norms queries
and keys where most targets do not; its norms begin at the size that the target's have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from drafters.checkpoint import AnyModel
from drafters.model import DraftModel
from engine.models.config import ModelConfig

#: a layer's tensors by their names within it
LayerTensors = Mapping[str, torch.Tensor]

_ALIKE = (
    "post_attention_layernorm.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)


def fits(model: AnyModel, target: ModelConfig) -> bool:
    """Whether the target's layers are of the draft model's kind, and there are as many."""
    own = model.config.layers
    return (
        target.fused
        and own.num_layers <= target.num_layers
        and own.num_kv_heads % target.num_kv_heads == 0
        and (own.hidden_size, own.intermediate_size, own.num_heads, own.head_dim)
        == (target.hidden_size, target.intermediate_size, target.num_heads, target.head_dim)
    )


@torch.no_grad()
def begin_as_target(
    model: AnyModel,
    target: ModelConfig,
    layers: Sequence[LayerTensors],
    norm: torch.Tensor,
    hidden: torch.Tensor,
    scale: torch.Tensor,
) -> None:
    """Copy `layers`, one for each of the model's, and the target's last `norm` [d].

    hidden [S, d] is the last feature of some positions; scale [d] is what the model's own is divided by.
    """
    first = layers[0]["input_layernorm.weight"]
    model.norm.weight.copy_(norm)
    parts: Sequence[nn.Module] = [model]
    if isinstance(model, DraftModel):
        parts = list(model.layers)
        _read_last(model.fc, scale)
        model.hidden_norm.weight.copy_(first)
    elif model.eagle:
        _read_last(model.fc, scale)
        model.hnorm.weight.copy_(first)
    else:  # beside the embedding, whose part stays as it is
        model.eh_proj.weight[:, -len(scale) :] = torch.diag(scale)
    for part, tensors in zip(parts, layers, strict=True):
        _copy_layer(dict(part.named_parameters()), target, tensors, hidden)


def _read_last(linear: nn.Linear, scale: torch.Tensor) -> None:
    linear.weight.zero_()
    linear.weight[:, -len(scale) :] = torch.diag(scale)


def _copy_layer(
    own: Mapping[str, nn.Parameter], target: ModelConfig, tensors: LayerTensors, hidden: torch.Tensor
) -> None:
    first = tensors["input_layernorm.weight"]
    if "input_layernorm.weight" in own:
        own["input_layernorm.weight"].copy_(first)
    for name in _ALIKE:
        own[name].copy_(tensors[name])
    size = target.hidden_size
    seen = nn.functional.rms_norm(hidden, (size,), first, target.rms_eps)
    for kind, heads in (("q", target.num_heads), ("k", target.num_kv_heads), ("v", target.num_kv_heads)):
        theirs, ours = tensors[f"self_attn.{kind}_proj.weight"], own[f"self_attn.{kind}_proj.weight"]
        by_head = theirs.view(heads, -1, theirs.shape[1]).repeat_interleave(len(ours) // len(theirs), 0)
        ours[:, -size:] = by_head.flatten(0, 1)  # Eagle3 reads the embedding before it
        norm = own.get(f"self_attn.{kind}_norm.weight")
        if norm is not None:
            known = tensors.get(f"self_attn.{kind}_norm.weight")
            norm.copy_((seen @ theirs.T).pow(2).mean().sqrt().expand_as(norm) if known is None else known)
