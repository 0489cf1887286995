"""Eagle3 and MTP-1 behind the engine's protocol, in torch, beside any executor.

K and V of pair i (the feature of position i, the token after it) lie at position i of the sequence's pages.
The last pair of a page looks at the first token of the next one: a sequence that shares the page and goes on
otherwise sees another text's pair there, or none where the text ended. That can only cost acceptance.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from drafters.chain import ChainModel
from drafters.places import places
from drafters.slots import Drawn, SlotDraw, choose, slot_draws
from engine.batch import BatchItem, DraftBlock, Tokens, Verdict, VerificationBatch
from engine.drafter import DraftRequest


class ChainDrafter:
    """`final_norm` [d] is the target's, for a model that reads its last hidden state."""

    def __init__(
        self,
        model: ChainModel,
        identity: str,
        num_pages: int,
        page_size: int,
        final_norm: torch.Tensor | None = None,
    ) -> None:
        shapes = model.config.layers
        self.name: str = model.config.family
        self.feature_layers = model.config.target_layer_ids
        self.identity = identity
        self.gamma = model.config.gamma
        self.model = model.eval()
        self.pool = model.norm.weight.new_zeros(
            (2, num_pages * page_size, shapes.num_kv_heads, shapes.head_dim), requires_grad=False
        )
        self.page_size, self.final_norm = page_size, final_norm
        self._last: dict[int, torch.Tensor] = {}  # g [d] before the anchor, of the sequences just verified

    def resize(self, pages: int) -> None:
        """Another number of pages, all empty."""
        _, _, *shape = self.pool.shape
        self.pool = self.pool.new_zeros((2, pages * self.page_size, *shape))

    @torch.no_grad()
    def observe(
        self, batch: VerificationBatch, features: torch.Tensor | None, verdicts: Sequence[Verdict]
    ) -> None:
        """Write the pairs of every row that is final: known tokens and accepted drafts."""
        assert features is not None
        self._last = {}
        rows: list[torch.Tensor] = []
        rows_of_pool: list[torch.Tensor] = []
        tokens: list[Tokens] = []
        positions: list[torch.Tensor] = []
        row = 0
        for item, verdict in zip(batch.items, verdicts, strict=True):
            following = _following(item, verdict)
            rows.append(features[row : row + len(following)])
            tokens.append(following)
            positions.append(torch.arange(item.start, item.start + len(following), device=self.pool.device))
            rows_of_pool.append(places(item.pages, positions[-1], self.page_size))
            row += item.count
        g = self.model.fuse(self._normed(torch.cat(rows).to(self.pool)))
        ids = torch.from_numpy(np.concatenate(tokens)).to(self.pool.device).long()
        pair = self.model.context(g, ids, torch.cat(positions))
        self.pool[:, torch.cat(rows_of_pool)] = torch.stack(pair)
        row = 0
        for item, own in zip(batch.items, tokens, strict=True):
            row += len(own)
            if len(own):
                self._last[item.sequence] = g[row - 1]

    def _normed(self, features: torch.Tensor) -> torch.Tensor:
        if self.final_norm is None:
            return features
        eps = self.model.config.layers.rms_eps
        return torch.nn.functional.rms_norm(features, self.final_norm.shape, self.final_norm, eps)

    @torch.no_grad()
    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftBlock | None]:
        """All chains side by side, slot by slot, at most gamma. q is what each token was drawn from."""
        counts = [min(request.slots, self.gamma) for request in requests]
        draws = slot_draws(requests, counts)
        drawn = [Drawn() for _ in requests]
        laws: list[list[torch.Tensor]] = [[] for _ in requests]
        device = self.pool.device
        anchors = torch.tensor([request.anchor for request in requests], device=device)
        seen, visible = self._seen(requests, anchors)
        g = torch.stack([self._last[request.sequence] for request in requests])
        previous = torch.tensor([int(request.tokens[-1]) for request in requests], device=device)
        for k in range(max(counts)):
            if k:
                more = self.model.context(g, previous, anchors - 1 + k)
                seen, visible = self.model.extend(seen, visible, more)
            g = self.model.step(g, previous, anchors - 1 + k, seen, visible)
            logits = self.model.logits(g).float()
            for i, count in enumerate(counts):
                if k < count:
                    token, law = self._choose(logits[i], draws[i][k])
                    drawn[i].tokens.append(token)
                    previous[i] = token
                    if law is not None:
                        laws[i].append(law)
        for each, own in zip(drawn, laws, strict=True):
            each.laws = torch.stack(own) if own else None
        return [each.block(self.model.d2t) for each in drawn]

    def _choose(self, logits: torch.Tensor, how: SlotDraw) -> tuple[int, torch.Tensor | None]:
        return choose(logits, how, self.model.d2t, self.model.config.layers.vocab_size)

    def _seen(
        self, requests: Sequence[DraftRequest], anchors: torch.Tensor
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """K and V [A, W, kv heads, D] of the pairs before each anchor, and which of them exist [A, W]."""
        longest = int(anchors.max())
        width = min(self.model.config.window or longest, longest)
        positions = anchors[:, None] + torch.arange(-width, 0, device=anchors.device)
        visible = positions >= 0
        positions = positions.clamp_min(0)
        rows = [places(r.pages, own, self.page_size) for r, own in zip(requests, positions, strict=True)]
        k, v = self.pool[:, torch.stack(rows)].unbind(0)
        return (k, v), visible


def _following(item: BatchItem, verdict: Verdict) -> Tokens:
    """The token after each row that is final; a text that ended has none after its last."""
    known = item.start + item.count - item.verify
    if not item.sample:
        return item.history[item.start + 1 : known + 1]
    text = np.concatenate((item.history[:known], np.asarray(verdict.tokens, dtype=np.int32)))
    return text[item.start + 1 : known + verdict.accepted + 1]
