"""The parallel backbone in torch: a block of [anchor, mask, ...] over K/V made from the target's features.

For training and as the reference; the parameter names are the checkpoint's. (Paper section 3.1, eq. 2 and 3.)
"""

from __future__ import annotations

import math

import torch
from torch import nn

from drafters.config import DraftConfig
from engine.models.config import ModelConfig
from engine.models.decoder import rope_frequencies


class Norm(nn.Module):
    """RMSNorm over the last axis."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(x.to(self.weight.dtype), x.shape[-1:], self.weight, self.eps)


class Rotary(nn.Module):
    """Rotates pairs (i, i + D/2) of each head by its position."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.register_buffer("frequencies", rope_frequencies(config), persistent=False)
        self.frequencies: torch.Tensor

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [..., heads, D], positions [...]."""
        angles = (positions[..., None].to(self.frequencies.dtype) * self.frequencies)[..., None, :]
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, dim
        self.q_proj = nn.Linear(hidden, self.heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, self.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, self.kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(self.heads * dim, hidden, bias=False)
        self.q_norm, self.k_norm = Norm(dim, config.rms_eps), Norm(dim, config.rms_eps)

    def keys_and_values(
        self, x: torch.Tensor, positions: torch.Tensor, rotary: Rotary
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [..., d], positions [...] -> two of [..., kv heads, D]; the same for context and block."""
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.dim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.dim))
        return rotary(self.k_norm(k), positions), v

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rotary: Rotary,
        context: tuple[torch.Tensor, torch.Tensor],
        visible: torch.Tensor,
    ) -> torch.Tensor:
        """x [A, n, d] blocks at positions [A, n].

        Context K and V [A, W, kv heads, D], visible [A, W] of it.
        """
        blocks, rows = x.shape[:2]
        q = rotary(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.dim))), positions)
        k, v = self.keys_and_values(x, positions, rotary)
        k, v = torch.cat((context[0], k), 1).transpose(1, 2), torch.cat((context[1], v), 1).transpose(1, 2)
        group = self.heads // self.kv_heads
        # Query heads that share keys become rows of one head.
        q = q.view(blocks, rows, self.kv_heads, group, self.dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
        mask = torch.cat((visible, visible.new_ones(blocks, rows)), 1)[:, None, None, :]
        scores = (q @ k.transpose(-1, -2)) / math.sqrt(self.dim)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        attended = (weights @ v).unflatten(2, (group, rows)).permute(0, 3, 1, 2, 4).flatten(2)
        out: torch.Tensor = self.o_proj(attended)
        return out


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_eps)
        self.mlp = FeedForward(config)

    def forward(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        rotary: Rotary,
        context: tuple[torch.Tensor, torch.Tensor],
        visible: torch.Tensor,
    ) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, rotary, context, visible)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Backbone(nn.Module):
    """fc, hidden_norm, layers, norm. The embedding is the target's and is handed in."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        shapes = config.layers
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * shapes.hidden_size, shapes.hidden_size, bias=False)
        self.hidden_norm = Norm(shapes.hidden_size, shapes.rms_eps)
        self.layers = nn.ModuleList(Layer(shapes) for _ in range(shapes.num_layers))
        self.norm = Norm(shapes.hidden_size, shapes.rms_eps)
        self.rotary = Rotary(shapes)

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def context(
        self, features: torch.Tensor, positions: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V [S, kv heads, D] of every layer from the features [S, m * d] at positions [S].

        A position's K and V depend on its own features alone, so they are final once they are written.
        """
        fused = self.hidden_norm(self.fc(features))
        return [layer.self_attn.keys_and_values(fused, positions, self.rotary) for layer in self._layers()]

    def block(
        self,
        blocks: torch.Tensor,
        anchors: torch.Tensor,
        context: list[tuple[torch.Tensor, torch.Tensor]],
        visible: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Hidden states [A, n, d] of embedded slots [A, n, d] whose first is at position anchors [A].

        context: K and V of each layer, [A, W, kv heads, D] or [W, kv heads, D] for a single block; visible
        [A, W] of it (None: all).
        """
        if context[0][0].dim() == 3:
            context = [(k[None], v[None]) for k, v in context]
        if visible is None:
            visible = torch.ones(context[0][0].shape[:2], dtype=torch.bool, device=blocks.device)
        positions = anchors[:, None] + torch.arange(blocks.shape[1], device=blocks.device)
        x = blocks
        for layer, pair in zip(self._layers(), context, strict=True):
            x = layer(x, positions, self.rotary, pair, visible)
        out: torch.Tensor = self.norm(x)
        return out

    def forward(
        self,
        features: torch.Tensor,
        anchors: torch.Tensor,
        blocks: torch.Tensor,
        sequence: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Hidden states h [A, n, d] of many blocks over one text.

        features [S, m * d]; anchors [A] positions; blocks [A, n, d] embeddings of the slots. A block sees the
        context before its anchor, at most `window` positions of it, and itself; blocks never see each other.
        Several texts may lie one behind another: `sequence` is then (start [A], of the anchor's text,
        positions [S] within the texts).
        """
        size, device = features.shape[0], features.device
        if sequence is None:
            sequence = torch.zeros_like(anchors), torch.arange(size, device=device)
        start, positions = sequence
        width = min(self.config.window or size, size)
        places = anchors[:, None] + torch.arange(-width, 0, device=device)
        visible = places >= start[:, None]
        places = places.clamp_min(0)
        context = [(k[places], v[places]) for k, v in self.context(features, positions)]
        return self.block(blocks, anchors - start, context, visible)
