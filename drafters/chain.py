"""Chain drafters in torch: one token after another, each from the features and tokens before it.

Eagle3: one decoder layer whose attention reads [embedding of the next token; fused features], and which is
fed its own output behind the last verified position (Li et al. 2025, section 3). MTP-1: one extra module over
[embedding of the next token; the target's last hidden state], for one token (DeepSeek-V3, section 2.2).

A pair i is the feature of position i with the token at i + 1; its K and V depend on nothing else, so what is
written for verified pairs is final.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from drafters.backbone import FeedForward, Norm, Rotary
from drafters.config import DraftConfig

Pair = tuple[torch.Tensor, torch.Tensor]


class ChainAttention(nn.Module):
    """Grouped-query attention whose q, k and v read `width` inputs, q and k normed or not."""

    def __init__(self, config: DraftConfig, width: int) -> None:
        super().__init__()
        shapes = config.layers
        dim = shapes.head_dim
        self.heads, self.kv_heads, self.dim = shapes.num_heads, shapes.num_kv_heads, dim
        self.q_proj = nn.Linear(width, self.heads * dim, bias=False)
        self.k_proj = nn.Linear(width, self.kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(width, self.kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(self.heads * dim, shapes.hidden_size, bias=False)
        norms = (Norm(dim, shapes.rms_eps) if config.chain.qk_norm else nn.Identity() for _ in range(2))
        self.q_norm, self.k_norm = norms

    def keys_and_values(self, x: torch.Tensor, positions: torch.Tensor, rotary: Rotary) -> Pair:
        """x [..., width] -> K and V [..., kv heads, D]."""
        k = rotary(self.k_norm(self.k_proj(x).unflatten(-1, (self.kv_heads, self.dim))), positions)
        return k, self.v_proj(x).unflatten(-1, (self.kv_heads, self.dim))

    def forward(
        self, x: torch.Tensor, positions: torch.Tensor, rotary: Rotary, seen: Pair, visible: torch.Tensor
    ) -> torch.Tensor:
        """A row of each of A chains: x [A, width], K and V [A, W, kv heads, D], visible [A, W] -> [A, d]."""
        q = rotary(self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.dim))), positions)
        q = q.unflatten(1, (self.kv_heads, -1))
        scores = torch.einsum("ahgd,awhd->ahgw", q, seen[0]) / math.sqrt(self.dim)
        weights = scores.masked_fill(~visible[:, None, None], -torch.inf).softmax(-1)
        out: torch.Tensor = self.o_proj(torch.einsum("ahgw,awhd->ahgd", weights, seen[1]).flatten(1))
        return out


class ChainModel(nn.Module):
    """Eagle3 or MTP-1, by `config.family`; `config.chain` says how its layer differs from DeepSpec's.

    Embedding [V, d] and head [V', d] are the target's, or a checkpoint's own. They stay frozen and are never
    part of the state.
    """

    def __init__(
        self,
        config: DraftConfig,
        embedding: torch.Tensor,
        head: torch.Tensor,
        d2t: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        shapes, hidden = config.layers, config.hidden_size
        self.config, self.layout = config, config.chain
        self.eagle = config.family == "eagle3"
        fused, eps = len(config.target_layer_ids), shapes.rms_eps
        if self.eagle:
            self.fc = nn.Linear(fused * hidden, hidden, bias=False)
        else:
            self.eh_proj = nn.Linear(2 * hidden, hidden, bias=False)
            self.input_layernorm = Norm(hidden, shapes.rms_eps)
        self.input_norm = Norm(fused * hidden, eps) if self.layout.norm_before_fc else nn.Identity()
        self.fc_norm = nn.ModuleList(Norm(hidden, eps) for _ in range(fused if self.layout.fc_norm else 0))
        self.enorm, self.hnorm = Norm(hidden, shapes.rms_eps), Norm(hidden, shapes.rms_eps)
        self.self_attn = ChainAttention(config, 2 * hidden if self.eagle else hidden)
        self.post_attention_layernorm = Norm(hidden, shapes.rms_eps)
        self.mlp = FeedForward(shapes)
        self.norm = Norm(hidden, shapes.rms_eps)
        self.rotary = Rotary(shapes)
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)
        self.register_buffer("d2t", d2t, persistent=False)
        self.embedding: torch.Tensor
        self.head: torch.Tensor
        self.d2t: torch.Tensor | None
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """The target's features [..., m * d] -> g [..., d]."""
        if not self.eagle:
            return features
        features = self.input_norm(features)
        if self.fc_norm:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        out: torch.Tensor = self.fc(features)
        return out

    def inputs(self, g: torch.Tensor, tokens: torch.Tensor) -> Pair:
        """Of pairs: (residual stream [..., d], what attention reads [..., width])."""
        normed = self.hnorm(g)
        both = torch.cat((self.enorm(self.embedding[tokens]), normed), -1)
        if self.eagle:
            return (normed if self.layout.norm_before_residual else g), both
        x = self.eh_proj(both)
        return x, self.input_layernorm(x)

    def context(self, g: torch.Tensor, tokens: torch.Tensor, positions: torch.Tensor) -> Pair:
        """K and V [S, kv heads, D] of the pairs (g [S, d], the next token [S]) at positions [S]."""
        return self.self_attn.keys_and_values(self.inputs(g, tokens)[1], positions, self.rotary)

    def step(
        self,
        g: torch.Tensor,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        seen: Pair,
        visible: torch.Tensor,
    ) -> torch.Tensor:
        """The next g [A, d] of A chains from g, the next token, position, and what each sees, itself too."""
        residual, x = self.inputs(g, tokens)
        residual = residual + self.self_attn(x, positions, self.rotary, seen, visible)
        out: torch.Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        if self.layout.norm_output:
            out = self.norm(out)
        return out

    def logits(self, g: torch.Tensor) -> torch.Tensor:
        """[..., V'] over the draft vocabulary, from what `step` returned."""
        out: torch.Tensor = (g if self.layout.norm_output else self.norm(g)) @ self.head.T
        return out

    def forward(
        self,
        features: torch.Tensor,
        following: torch.Tensor,
        anchors: torch.Tensor,
        previous: torch.Tensor,
        sequence: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """g [A, n, d] of chains along a known text: training-time test, from its own outputs on.

        features [S, m * d]; following [S], the token after each position; anchors [A] positions, all >= 1 in
        their text; previous [A, n] the token before each slot's; sequence as `Backbone.forward` takes it.
        """
        start, positions = sequence
        g = self.fuse(features)
        keys, values = self.context(g, following, positions)
        width = min(self.config.window or len(g), len(g))
        places = anchors[:, None] + torch.arange(-width, 0, device=g.device)  # the last is the chain's own
        visible = places >= start[:, None]
        places = places.clamp_min(0)
        seen, g, out = (keys[places], values[places]), g[anchors - 1], []
        for k in range(previous.shape[1]):
            at = anchors - start - 1 + k
            if k:
                seen, visible = self.extend(seen, visible, self.context(g, previous[:, k], at))
            g = self.step(g, previous[:, k], at, seen, visible)
            out.append(g)
        return torch.stack(out, 1)

    @staticmethod
    def extend(seen: Pair, visible: torch.Tensor, more: Pair) -> tuple[Pair, torch.Tensor]:
        """One more pair behind those that each chain has seen: K and V [A, kv heads, D]."""
        k, v = (torch.cat((old, new[:, None]), 1) for old, new in zip(seen, more, strict=True))
        return (k, v), torch.cat((visible, visible.new_ones(len(visible), 1)), 1)
