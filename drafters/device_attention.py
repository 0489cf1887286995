"""What the slots of many blocks attend to, on a device: their context in the pool, and each other.

With a window, context is gathered and attention is dense, under a mask. Without, slots are rows of the same
paged attention as the target's, not causal, behind K and V written to the reserved ends of their pages.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F

from engine.cuda.attention import Attention
from engine.cuda.kv_pool import KVPool


class BlockAttend(Protocol):
    """q [N, n, heads, D], k and v [N, n, kv heads, D] of one layer's slots -> [N, n, heads * D]."""

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor: ...


class WindowAttend:
    """Sees `window` positions before each block. Never looks at values on the host, so it can be recorded.

    pages [N, P] are those that the window touches, from the one of position `first_page` [N] * page size on;
    starts [N] the blocks' positions; counts [N] how many slots of each block there are.
    """

    def __init__(
        self,
        pool: KVPool,
        window: int,
        slots: int,
        pages: torch.Tensor,
        first_page: torch.Tensor,
        starts: torch.Tensor,
        counts: torch.Tensor,
    ) -> None:
        self.pool = pool
        device = pages.device
        positions = starts[:, None] + torch.arange(-window, 0, device=device)
        seen = positions >= 0
        columns = (positions // pool.page_size - first_page[:, None]).clamp_min(0)
        self.rows = pages.gather(1, columns) * pool.page_size + positions % pool.page_size
        own = torch.arange(slots, device=device) < counts[:, None]
        self.seen = seen
        self.mask = torch.cat((seen, own), 1)[:, None, None, :]

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        blocks, slots, kv_heads, dim = k.shape
        # What a masked place holds may be no number at all, and no weight makes that one.
        unseen = ~self.seen[:, :, None, None]
        before = [
            pool[layer].flatten(0, 1)[self.rows].masked_fill(unseen, 0.0)
            for pool in (self.pool.keys, self.pool.values)
        ]
        keys, values = (torch.cat(both, 1).transpose(1, 2) for both in zip(before, (k, v), strict=True))
        # Query heads that share keys become rows of one head.
        folded = q.view(blocks, slots, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)
        group = folded.shape[2]
        mask = self.mask.expand(-1, -1, group * slots, -1)
        out = F.scaled_dot_product_attention(folded.flatten(2, 3), keys, values, attn_mask=mask)
        return out.view(blocks, kv_heads, group, slots, dim).permute(0, 3, 1, 2, 4).flatten(2)


class PageAttend:
    """Sees all of the context, by an attention that was planned for the blocks' rows.

    slots [N * n] are where the K and V of each go. `order` lists rows as the plan has them, those of no block
    last or left out; `places` [N * n] where each slot's row is in that list.
    """

    def __init__(
        self,
        pool: KVPool,
        attention: Attention,
        slots: torch.Tensor,
        order: torch.Tensor,
        places: torch.Tensor,
    ) -> None:
        self.pool, self.attention = pool, attention
        self.slots, self.order, self.places = slots, order, places

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        blocks, count = q.shape[:2]
        self.pool.write(layer, self.slots, k.flatten(0, 1), v.flatten(0, 1))
        rows = q.flatten(0, 1)[self.order]
        out = self.attention.run(rows, self.pool.keys[layer], self.pool.values[layer], None)
        return out[self.places].view(blocks, count, -1)
