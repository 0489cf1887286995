"""The seam between a model's layers and paged attention: planned once a step, run once a layer.

`engine.cuda.flashinfer` is what serves; `engine.cuda.sdpa` does the same in torch, slowly and without graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.cuda.kv_pool import KVPool
from engine.cuda.paging import PagedRows
from engine.cuda.staging import Writer
from engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What kernels are made for. `windows` are those that layers have; None: a layer sees everything."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    windows: tuple[int | None, ...] = (None,)
    causal: bool = True

    @classmethod
    def of(
        cls, config: ModelConfig, page_size: int, dtype: torch.dtype, causal: bool = True
    ) -> AttentionShape:
        windows = tuple(sorted(set(config.sliding_windows), key=lambda window: window or 0))
        return cls(config.num_heads, config.num_kv_heads, config.head_dim, page_size, dtype, windows, causal)

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)


class Attention(Protocol):
    """Attention of one kind of step, over pools that are handed in layer by layer."""

    def plan(self, rows: PagedRows, writer: Writer) -> None:
        """Before the step's first layer, on the same stream. Never inside a graph."""

    def run(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """q [T, heads, D] over pools [pages, page size, kv heads, D] -> [T, heads, D]."""


class AttentionBackend(Protocol):
    """Makes them."""

    name: str
    #: whether what `fixed` makes may be captured in a graph
    capturable: bool

    def eager(self, shape: AttentionShape) -> Attention:
        """For steps of any size."""

    def fixed(self, shape: AttentionShape, rows: int, pages: int) -> Attention:
        """For a graph of so many rows and request slots, which together hold at most `pages` page ids."""


class PoolAttend:
    """`Attend` of a model over a pool: K and V go to `slots` first; each part then attends to its own rows.

    `parts` are attentions with the number of rows that each has, one after another.
    """

    def __init__(
        self, pool: KVPool, slots: torch.Tensor, parts: Sequence[tuple[Attention, int]], scale: float
    ) -> None:
        self.pool, self.slots, self.parts, self.scale = pool, slots, parts, scale

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
        """See `Attend`. Soft caps do not occur: the fused decoder has none."""
        assert softcap is None
        assert scale == self.scale, "planned for another scale"
        self.pool.write(layer, self.slots, k, v)
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        out, row = [], 0
        for attention, rows in self.parts:
            out.append(attention.run(q[row : row + rows], keys, values, window))
            row += rows
        return out[0] if len(out) == 1 else torch.cat(out)
