"""What a block drafter asks of whatever computes it, and the same over pages in torch.

`engine.native.draft.NativeDraftModel` is the other implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from drafters.model import DraftModel
from drafters.places import places
from drafters.slots import Drawn, SlotDraw, choose
from engine.native.draft import Span


class DraftBlocks(Protocol):
    """Context K/V, backbone and sequential head over the target's page ids."""

    def write_context(self, spans: Sequence[Span], features: torch.Tensor) -> None:
        """K and V of every layer from the features [rows of all spans, m * d]."""

    def draft(
        self, spans: Sequence[Span], anchors: Sequence[int], draws: Sequence[list[SlotDraw]]
    ) -> list[Drawn]:
        """A block for each span, whose `start` is the anchor's position and `count` the number of slots."""


class TorchDraftBlocks:
    """Works on any device, one block after another: the reference."""

    def __init__(self, model: DraftModel, num_pages: int, page_size: int) -> None:
        self.model = model.eval()
        shapes = model.config.layers
        size = (2, shapes.num_layers, num_pages * page_size, shapes.num_kv_heads, shapes.head_dim)
        self.pool = model.fc.weight.new_zeros(size)
        self.page_size = page_size

    def _places(self, span: Span, first: int, last: int) -> torch.Tensor:
        """Rows of the pool that hold positions [first, last) of a span's sequence."""
        positions = torch.arange(first, last, device=self.pool.device)
        return places(span.pages, positions, self.page_size)

    @torch.no_grad()
    def write_context(self, spans: Sequence[Span], features: torch.Tensor) -> None:
        row = 0
        for span in spans:
            positions = torch.arange(span.start, span.start + span.count, device=self.pool.device)
            pairs = self.model.context(features[row : row + span.count].to(self.pool), positions)
            places = self._places(span, span.start, span.start + span.count)
            for layer, (k, v) in enumerate(pairs):
                self.pool[0, layer, places], self.pool[1, layer, places] = k, v
            row += span.count

    @torch.no_grad()
    def draft(
        self, spans: Sequence[Span], anchors: Sequence[int], draws: Sequence[list[SlotDraw]]
    ) -> list[Drawn]:
        return [self._block(*each) for each in zip(spans, anchors, draws, strict=True)]

    def _block(self, span: Span, anchor: int, draws: list[SlotDraw]) -> Drawn:
        model, window = self.model, self.model.config.window
        first = 0 if window is None else max(0, span.start - window)
        context = self.pool[:, :, self._places(span, first, span.start)]
        unread = model.config.unread
        block = model.slots(torch.tensor([anchor], device=self.pool.device), span.count + unread)
        pairs = list(zip(*context.unbind(0), strict=True))
        hidden = model.block(block, torch.tensor([span.start], device=self.pool.device), pairs)[0, unread:]
        out, previous, laws = Drawn(confidence=[] if model.confidence_head is not None else None), anchor, []
        base = hidden @ model.head.T
        state = hidden.new_zeros(1, model.config.rank)
        for k, how in enumerate(draws):
            logits, token = base[k : k + 1], torch.tensor([previous], device=self.pool.device)
            embedded = None
            if model.markov_head is not None:
                embedded = model.markov_head.markov_w1(token)
                mixed, state = model.markov_head.step(embedded, hidden[k : k + 1], state)
                logits = logits + model.markov_head.markov_w2(mixed)
            if model.confidence_head is not None and out.confidence is not None:
                out.confidence.append(float(model.confidence_head(hidden[k : k + 1], embedded)))
            previous, law = choose(logits[0].float(), how, model.d2t, model.config.layers.vocab_size)
            out.tokens.append(previous)
            if law is not None:
                laws.append(law)
        out.laws = torch.stack(laws) if laws else None
        return out
