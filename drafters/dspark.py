"""DSpark behind the engine's protocol.

Context K/V from verified features, then a block for whoever is to draft. DFlash, in DSpark's slot layout or
its own, is the same without a sequential head.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafters.blocks import DraftBlocks
from drafters.config import DraftConfig
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
        identity: str,
        d2t: torch.Tensor | None = None,
    ) -> None:
        self.name = "dspark" if config.head != "none" else "dflash"
        self.feature_layers = config.target_layer_ids
        self.identity = identity
        self.gamma = config.gamma
        self.config, self.blocks, self.d2t = config, blocks, d2t

    def observe(
        self, batch: VerificationBatch, features: torch.Tensor | None, verdicts: Sequence[Verdict]
    ) -> None:
        """Write context K/V of every row that is final: known tokens and accepted drafts."""
        assert features is not None
        spans: list[Span] = []
        rows: list[torch.Tensor] = []
        row = 0
        for item, verdict in zip(batch.items, verdicts, strict=True):
            final = item.count - item.verify + verdict.accepted
            spans.append(Span(item.start, final, item.pages))
            rows.append(features[row : row + final])
            row += item.count
        whole = sum(span.count for span in spans) == features.shape[0]
        self.blocks.write_context(spans, features if whole else torch.cat(rows))

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftBlock | None]:
        """As many slots as asked for, at most gamma. q is what each token was drawn from, filters applied."""
        counts = [min(request.slots, self.gamma) for request in requests]
        spans = [
            Span(request.anchor, count, request.pages)
            for request, count in zip(requests, counts, strict=True)
        ]
        anchors = [int(request.tokens[-1]) for request in requests]
        draws = slot_draws(requests, counts)
        return [drawn.block(self.d2t) for drawn in self.blocks.draft(spans, anchors, draws)]
