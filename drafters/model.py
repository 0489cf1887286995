"""A whole block drafter in torch: backbone, sequential head, confidence head.

DSpark, or DFlash without head.
"""

from __future__ import annotations

import torch
from torch import nn

from drafters.backbone import Backbone
from drafters.config import DraftConfig
from drafters.heads import ConfidenceHead, MarkovHead


class DraftModel(Backbone):
    """Parameter names are those of DeepSpec's checkpoints, less the embedding and head.

    Which are the target's. `embedding` [V, d] and `head` [V', d] stay frozen and are never part of the
    state; `d2t` [V'] are the target ids of a reduced draft vocabulary.
    """

    def __init__(
        self,
        config: DraftConfig,
        embedding: torch.Tensor,
        head: torch.Tensor,
        d2t: torch.Tensor | None = None,
    ) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config) if config.head != "none" else None
        self.confidence_head = ConfidenceHead(config) if config.confidence else None
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head, persistent=False)
        self.register_buffer("d2t", d2t, persistent=False)
        self.embedding: torch.Tensor
        self.head: torch.Tensor
        self.d2t: torch.Tensor | None
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.weight.shape[0] > 1 and module.weight.abs().sum() > 0:
                nn.init.normal_(module.weight, std=0.02)

    def slots(self, anchors: torch.Tensor, count: int) -> torch.Tensor:
        """Embeddings [A, count, d] of [anchor token, mask, mask, ...]; anchors [A] token ids."""
        ids = torch.full(
            (len(anchors), count), self.config.mask_token_id, dtype=torch.int64, device=anchors.device
        )
        ids[:, 0] = anchors
        return self.embedding[ids]

    def block_logits(
        self, hidden: torch.Tensor, previous: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Logits [A, n, V'] and confidence logits [A, n], given the token before every slot [A, n]."""
        logits = hidden @ self.head.T
        embedded = None
        if self.markov_head is not None:
            embedded = self.markov_head.markov_w1(previous)
            logits = logits + self.markov_head(embedded, hidden)
        confidence = self.confidence_head(hidden, embedded) if self.confidence_head is not None else None
        return logits, confidence
