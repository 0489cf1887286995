"""The reference executor: torch, any dense model, any machine. Pages are gathered per sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from engine.batch import BatchItem, ForwardOutput, VerificationBatch
from engine.models.base import Model


class TorchExecutor:
    """K/V pools are [kv heads, pages * page size, head dim] a layer: gathered pages need no transpose."""

    def __init__(
        self,
        model: Model,
        num_pages: int,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.model = model
        self.config = model.config
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        self.device = torch.device(device)
        shape = (self.config.num_kv_heads, num_pages * page_size, self.config.head_dim)
        self.keys = [
            torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(self.config.num_layers)
        ]
        self.values = [torch.zeros_like(pool) for pool in self.keys]

    @torch.inference_mode()
    def forward(self, batch: VerificationBatch, feature_layers: tuple[int, ...] = ()) -> ForwardOutput:
        """See `Executor.forward`."""
        device = self.device
        tokens = torch.from_numpy(batch.tokens().astype(np.int64)).to(device)
        positions = torch.from_numpy(batch.positions()).to(device)
        attend = PagedAttention(self, batch.items)
        hidden, features = self.model.forward(tokens, positions, attend, feature_layers)
        logits = self.model.logits(hidden[torch.from_numpy(batch.logit_rows()).to(device)])
        return ForwardOutput(logits, features)

    def describe(self) -> Mapping[str, Any]:
        """See `Executor.describe`."""
        return {
            "executor": "torch",
            "device": str(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "model_class": type(self.model).__name__,
        }


class PagedAttention:
    """`Attend` over one batch: scatter the rows' K/V into pages, then attend sequence by sequence.

    A sequence's query rows of one K/V head are folded together (group * rows), which makes one product of
    many small ones. Pages that happen to follow one another are read in place instead of gathered.
    """

    def __init__(self, executor: TorchExecutor, items: tuple[BatchItem, ...]) -> None:
        self.executor = executor
        self.items = items
        size, device = executor.page_size, executor.device
        self.slots = torch.from_numpy(np.concatenate([row_slots(item, size) for item in items])).to(device)
        self.pages: list[slice | torch.Tensor] = []
        for item in items:
            used = item.pages[: -(-(item.start + item.count) // size)]
            if len(used) == 1 or bool((np.diff(used) == 1).all()):
                first = int(used[0]) * size
                self.pages.append(slice(first, first + item.start + item.count))
            else:
                self.pages.append(torch.from_numpy(used.astype(np.int64)).to(device))
        self._masks: dict[tuple[int, int | None], torch.Tensor | None] = {}

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        """See `Attend`."""
        keys, values = self.executor.keys[layer], self.executor.values[layer]
        keys.index_copy_(1, self.slots, k.transpose(0, 1))
        values.index_copy_(1, self.slots, v.transpose(0, 1))
        kv_heads, dim = k.shape[1], k.shape[2]
        out = torch.empty_like(q)
        row = 0
        for index, item in enumerate(self.items):
            rows = slice(row, row + item.count)
            row += item.count
            length = item.start + item.count
            context_k, context_v = self._read(keys, index, length), self._read(values, index, length)
            folded = q[rows].view(item.count, kv_heads, -1, dim).permute(1, 2, 0, 3)
            group = folded.shape[1]
            folded = folded.reshape(kv_heads, group * item.count, dim)
            mask = self._mask(index, window)
            whole = None if mask is None else mask.repeat(group, 1)
            attended = _attend(folded, context_k, context_v, whole, scale, softcap)
            if mask is not None and not bool(attended.isfinite().all()):
                # Weight 0 takes a finite key away, but not NaN: a later row's fault is not an earlier one's.
                for i, seen in enumerate(mask):
                    own = context_k[:, seen], context_v[:, seen]
                    attended[:, i :: item.count] = _attend(
                        folded[:, i :: item.count], *own, None, scale, softcap
                    )
            unfolded = attended.view(kv_heads, group, item.count, dim).permute(2, 0, 1, 3)
            out[rows] = unfolded.reshape(item.count, kv_heads * group, dim)
        return out

    def _read(self, pool: torch.Tensor, index: int, length: int) -> torch.Tensor:
        """A sequence's first `length` positions of a pool: [kv heads, length, D]."""
        pages = self.pages[index]
        if isinstance(pages, slice):
            return pool[:, pages]
        heads, _, dim = pool.shape
        paged = pool.view(heads, self.executor.num_pages, self.executor.page_size * dim)
        return paged.index_select(1, pages).view(heads, -1, dim)[:, :length]

    def _mask(self, index: int, window: int | None) -> torch.Tensor | None:
        """Causal (and windowed) visibility [rows, length] of one sequence, True: seen. None: all is seen."""
        if (index, window) not in self._masks:
            item = self.items[index]
            length = item.start + item.count
            mask: torch.Tensor | None = None
            if item.count > 1 or (window is not None and length > window):
                query = torch.arange(item.start, length, device=self.executor.device)[:, None]
                key = torch.arange(length, device=self.executor.device)
                mask = key <= query
                if window is not None:
                    mask &= key > query - window
            self._masks[index, window] = mask
        return self._masks[index, window]


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """Dense attention: q [H, n, D], k and v [H, m, D], mask [n, m] (True: seen) -> [H, n, D]."""
    if softcap is None:
        return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scale)[0]
    scores = softcap * torch.tanh((q @ k.transpose(1, 2)) * scale / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.softmax(scores, -1) @ v


def row_slots(item: BatchItem, page_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Pool positions [count] of an item's rows."""
    positions = np.arange(item.start, item.start + item.count, dtype=np.int64)
    return item.pages[positions // page_size].astype(np.int64) * page_size + positions % page_size
