"""Paged attention in torch, request by request: what runs where FlashInfer is not installed.

Works on any device and in any type; not capturable, since what it does depends on the lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.cuda.attention import Attention, AttentionShape
from engine.cuda.paging import PagedRows
from engine.cuda.staging import Writer


class SdpaBackend:
    """See `AttentionBackend`."""

    name = "sdpa"
    capturable = False

    def eager(self, shape: AttentionShape) -> Attention:
        return _SdpaAttention(shape)

    def fixed(self, shape: AttentionShape, rows: int, pages: int) -> Attention:
        raise NotImplementedError("attention in torch cannot be captured in a graph")


@dataclass(slots=True)
class _Request:
    rows: slice
    length: int
    pages: torch.Tensor


class _SdpaAttention:
    """A request's query rows of one K/V head are folded together, which makes one product of many."""

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
        self._requests: list[_Request] = []
        self._masks: dict[tuple[int, int | None], torch.Tensor | None] = {}

    def plan(self, rows: PagedRows, writer: Writer) -> None:
        (indices,) = writer.device(rows.kv_indices)
        starts, pages = rows.qo_indptr.tolist(), rows.kv_indptr.tolist()
        self._requests = [
            _Request(slice(starts[i], starts[i + 1]), length, indices[pages[i] : pages[i + 1]].long())
            for i, length in enumerate(rows.kv_lens.tolist())
            if starts[i + 1] > starts[i]
        ]
        self._masks.clear()

    def run(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        out = torch.zeros_like(q)
        heads, dim = self.shape.kv_heads, self.shape.head_dim
        for index, request in enumerate(self._requests):
            k, v = (
                pool[request.pages].flatten(0, 1)[: request.length].transpose(0, 1) for pool in (keys, values)
            )
            mine = q[request.rows]
            folded = mine.view(len(mine), heads, -1, dim).permute(1, 2, 0, 3)
            group = folded.shape[1]
            mask = self._mask(index, window, q.device)
            attended = F.scaled_dot_product_attention(
                folded.reshape(1, heads, -1, dim),
                k[None],
                v[None],
                attn_mask=None if mask is None else mask.repeat(group, 1),
                scale=self.shape.scale,
            )[0]
            out[request.rows] = attended.view(heads, group, len(mine), dim).permute(2, 0, 1, 3).flatten(1, 2)
        return out

    def _mask(self, index: int, window: int | None, device: torch.device) -> torch.Tensor | None:
        """Which keys the rows of a request see [rows, length]; None: all."""
        if (index, window) not in self._masks:
            request = self._requests[index]
            count = request.rows.stop - request.rows.start
            mask: torch.Tensor | None = None
            if (self.shape.causal and count > 1) or (window is not None and request.length > window):
                query = torch.arange(request.length - count, request.length, device=device)[:, None]
                key = torch.arange(request.length, device=device)
                mask = key <= query if self.shape.causal else torch.ones_like(key - query, dtype=torch.bool)
                if window is not None:
                    mask &= key > query - window
            self._masks[index, window] = mask
        return self._masks[index, window]
