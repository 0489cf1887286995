"""DSpark behind the engine's protocol.

Context K/V from verified features, then a block for whoever is to draft. DFlash, in DSpark's slot layout or
its own, is the same without a sequential head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafters.blocks import DraftBlocks
from drafters.config import DraftConfig
from drafters.context import Context
from drafters.slots import slot_draws
from engine.batch import DraftBlock, Verdict, VerificationBatch
from engine.drafter import DraftRequest
from engine.native.draft import Span


class DSparkDrafter:
    """`blocks` computes; `d2t` [V'] are the target ids of a reduced vocabulary.

    `identity` names the weights.
    """

    def __init__(
        self,
        config: DraftConfig,
        blocks: DraftBlocks,
        page_size: int,
        identity: str,
        d2t: torch.Tensor | None = None,
    ) -> None:
        self.name = "dspark" if config.head != "none" else "dflash"
        self.feature_layers = config.target_layer_ids
        self.identity = identity
        self.gamma = config.gamma
        self.config, self.blocks, self.d2t = config, blocks, d2t
        self.context = Context(blocks, page_size)

    def observe(
        self, batch: VerificationBatch, features: torch.Tensor | None, verdicts: Sequence[Verdict]
    ) -> None:
        """See `drafters.context`."""
        assert features is not None
        self.context.observe(batch, features, verdicts)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftBlock | None]:
        """As many slots as asked for, at most gamma. q is what each token was drawn from, filters applied."""
        counts = [min(request.slots, self.gamma) for request in requests]
        spans = [
            Span(request.anchor, count, request.pages)
            for request, count in zip(requests, counts, strict=True)
        ]
        anchors = [int(request.tokens[-1]) for request in requests]
        self.context.complete(request.sequence for request in requests)
        draws = slot_draws(requests, counts)
        return [drawn.block(self.d2t) for drawn in self.blocks.draft(spans, anchors, draws)]
