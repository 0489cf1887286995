"""The fused dense decoder: Llama, SmolLM, Mistral, Qwen2 and Qwen3 in one forward pass.

q, k and v are one product, gate and up another. Attention is left to the caller, who knows about pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.linear import linear, wide_linear
from engine.models.base import Attend
from engine.models.config import ModelConfig
from engine.models.shapes import check_shapes

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(slots=True)
class _Layer:
    input_norm: torch.Tensor
    qkv: Product
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Product
    mlp_norm: torch.Tensor
    gate_up: Product
    down: Product


class MissingWeights(ValueError):
    """The checkpoint lacks tensors that its config asks for."""


class FusedDecoder:
    """A `Model` built from a checkpoint's tensors under their Hugging Face names.

    Raises MissingWeights, or CorruptModel for shapes that are not the config's.

    With `max_positions` it is made for so many, and never looks at positions to see how far it must go: on a
    device that would wait for everything queued, and a graph cannot do it at all.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Iterable[tuple[str, torch.Tensor]],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        max_positions: int | None = None,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.max_positions = max_positions
        weights = {
            name.removeprefix("model."): tensor.to(device=device, dtype=dtype) for name, tensor in tensors
        }
        check_shapes(config, {name: tuple(tensor.shape) for name, tensor in weights.items()})

        def take(name: str, needed: bool = True) -> torch.Tensor | None:
            tensor = weights.pop(name, None)
            if tensor is None and needed:
                raise MissingWeights(f"the checkpoint has no tensor {name!r}")
            return tensor

        def need(name: str) -> torch.Tensor:
            tensor = take(name)
            assert tensor is not None
            return tensor

        def fuse(prefix: str, names: tuple[str, ...], bias: bool) -> Product:
            weight = torch.cat([need(f"{prefix}.{name}.weight") for name in names])
            biases = [need(f"{prefix}.{name}.bias") for name in names] if bias else None
            return linear(weight, torch.cat(biases) if biases else None)

        self.embedding = need("embed_tokens.weight")
        self.layers: list[_Layer] = []
        for i in range(config.num_layers):
            at = f"layers.{i}"
            self.layers.append(
                _Layer(
                    need(f"{at}.input_layernorm.weight"),
                    fuse(f"{at}.self_attn", ("q_proj", "k_proj", "v_proj"), config.qkv_bias),
                    take(f"{at}.self_attn.q_norm.weight", config.qk_norm),
                    take(f"{at}.self_attn.k_norm.weight", config.qk_norm),
                    fuse(f"{at}.self_attn", ("o_proj",), config.output_bias),
                    need(f"{at}.post_attention_layernorm.weight"),
                    fuse(f"{at}.mlp", ("gate_proj", "up_proj"), config.mlp_bias),
                    fuse(f"{at}.mlp", ("down_proj",), config.mlp_bias),
                )
            )
        self.norm = need("norm.weight")
        head = self.embedding if config.tie_embeddings else need("lm_head.weight")
        self.head = wide_linear(head)
        #: [V, d], for drafters that share it; on a CPU it is kept in packed form only
        self.head_weight = head if head is self.embedding or head.device.type != "cpu" else None
        self.inv_freq = rope_frequencies(config).to(device)
        self._table = self._rope_table(max_positions or min(config.max_position, 8192))

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Model.forward`."""
        config = self.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        scale = dim**-0.5
        rows = tokens.shape[0]
        cos, sin = self._rotation(positions)
        x = F.embedding(tokens, self.embedding)
        features = {-1: x} if -1 in feature_layers else {}
        for i, layer in enumerate(self.layers):
            qkv = layer.qkv(self._norm(x, layer.input_norm)).view(rows, heads + 2 * kv_heads, dim)
            q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
            if layer.q_norm is not None and layer.k_norm is not None:
                q, k = self._norm(q, layer.q_norm), self._norm(k, layer.k_norm)
            if config.rope_layers[i]:
                q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            attended = attend(i, q, k, v, scale=scale, window=config.sliding_windows[i])
            x = x + layer.output(attended.reshape(rows, heads * dim))
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
            if i in feature_layers:
                features[i] = x
        hidden = self._norm(x, self.norm)
        if not feature_layers:
            return hidden, None
        return hidden, torch.cat([features[i] for i in feature_layers], dim=-1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `Model.logits`."""
        return self.head(hidden)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.rms_eps)

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the rows' angles, each [T, 1, D]."""
        if self.max_positions is None and positions.numel():
            last = int(positions.max())
            if last >= self._table.shape[0]:
                self._table = self._rope_table(max(last + 1, 2 * self._table.shape[0]))
        cos, sin = self._table[positions].chunk(2, dim=-1)
        return cos[:, None], sin[:, None]

    def _rope_table(self, length: int) -> torch.Tensor:
        """[length, 2 D]: cos then sin, each angle twice, since dimension i is rotated with i + D/2."""
        angles = torch.outer(
            torch.arange(length, dtype=self.inv_freq.dtype, device=self.inv_freq.device), self.inv_freq
        )
        angles = torch.cat((angles, angles), dim=-1)
        return torch.cat((angles.cos(), angles.sin()), dim=-1).to(self.dtype)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, halves paired (the layout of Hugging Face checkpoints). x [T, H, D]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rope_frequencies(config: ModelConfig) -> torch.Tensor:
    """Inverse frequencies [D/2] in fp32, with linear or llama3 scaling applied.

    Raises ValueError for any other scaling: such models do not run on the fused decoder.
    """
    dim = config.head_dim
    inv_freq = 1.0 / config.rope_theta ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return inv_freq
    if kind == "linear":
        return inv_freq / float(scaling["factor"])
    if kind == "llama3":
        factor = float(scaling["factor"])
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        original = float(scaling["original_max_position_embeddings"])
        wavelength = 2 * math.pi / inv_freq
        # 0 where the wavelength is long (scaled down), 1 where it is short (kept), a ramp in between
        keep = ((original / wavelength - low) / (high - low)).clamp(0.0, 1.0)
        return inv_freq * (keep + (1.0 - keep) / factor)
    raise ValueError(f"rope scaling {kind!r} is not covered by the fused decoder")
