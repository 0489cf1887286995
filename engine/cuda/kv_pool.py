"""K and V of some layers over the engine's pages, and one page more that belongs to nobody."""

from __future__ import annotations

import torch


class KVPool:
    """Tensors [pages + 1, page size, kv heads, D], two a layer; padding rows write to the last page.

    Made of zeros, so that what was never written is at least a number.
    """

    def __init__(
        self,
        layers: int,
        pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers, self.page_size = layers, page_size
        self._page = (page_size, kv_heads, head_dim)
        self.dtype, self.device = dtype, device
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.resize(pages)

    def resize(self, pages: int) -> None:
        """Another number of pages, all empty. Not for a pool that a graph was captured with."""
        self.pages = pages
        self.keys.clear()  # before the new ones are made: both need not fit
        self.values.clear()
        for _ in range(self.layers):
            for pool in (self.keys, self.values):
                pool.append(torch.zeros((pages + 1, *self._page), dtype=self.dtype, device=self.device))

    @property
    def scratch(self) -> int:
        return self.pages

    @property
    def page_bytes(self) -> int:
        """Of a page in all layers."""
        size, heads, dim = self._page
        return 2 * self.layers * size * heads * dim * self.dtype.itemsize

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """k, v [T, kv heads, D] to pool rows slots [T]."""
        for pool, new in ((self.keys[layer], k), (self.values[layer], v)):
            pool.flatten(0, 1).index_copy_(0, slots, new)
