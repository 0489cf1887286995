"""Paged attention by FlashInfer: one kind of wrapper for plain decoding, verification, prefill and blocks.

What its documentation asks for, and what it does not say, is kept here. Types default to float16, so they are
always named, and so is the fa2 kernel. Lengths are host tensors (device tensors would be copied back, which
waits for everything queued), page ids a device tensor. Index types are int32. `plan` queues a copy of its
schedule from a host buffer of the wrapper's own, which a second `plan` would overwrite before the first copy
ran: a fence lies between. In a graph the number of request slots is fixed and decides the tile of queries:
with as many slots as rows, every row may be a request, and the tile is the small one that verification wants.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch

from engine.cuda.attention import Attention, AttentionShape
from engine.cuda.paging import PagedRows, paged_rows
from engine.cuda.staging import Staging, Writer
from engine.cuda.stream import Fence, Stream
from engine.native.draft import Span

VERSION = "0.7.2.post1"
_WORKSPACE = 512 << 20  # bytes for partial results; more is taken where the planner says so
_OWN = 8 << 20  # bytes of a wrapper's schedule, as its constructor has it
_PAGE = np.zeros(1, dtype=np.int32)


class FlashInferMissing(RuntimeError):
    """FlashInfer cannot be used; the message says why, and what to do."""


def wrapper_class() -> Any:
    """FlashInfer's wrapper. Raises FlashInferMissing."""
    try:
        return import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    except (ImportError, OSError) as error:  # it makes folders of its own when it is imported
        raise FlashInferMissing(
            f"FlashInfer is not usable here ({error}); install it with: pip install 'dspark-server[gpu]'"
        ) from error


class FlashInferBackend:
    """See `AttentionBackend`. All wrappers share one workspace and one array of page ids.

    That is safe as long as plans and what they are for are queued on one stream, each pair before the next.
    """

    name = "flashinfer"
    capturable = True

    def __init__(self, stream: Stream, wrapper: Any = None, workspace: int = _WORKSPACE) -> None:
        self.stream = stream
        self._wrapper = wrapper_class() if wrapper is None else wrapper
        self._workspace = torch.zeros(workspace, dtype=torch.uint8, device=stream.device)
        self._page_ids = self._zeros(0)

    def check(self, shape: AttentionShape) -> None:
        """Raises FlashInferMissing if there are no kernels for this, and no compiler to make them."""
        with Staging(self.stream).turn() as writer:
            try:
                self.eager(shape).plan(paged_rows([Span(0, 1, _PAGE)], shape.page_size, 0), writer)
            except (RuntimeError, OSError) as error:
                raise FlashInferMissing(f"FlashInfer has no kernels for this model ({error})") from error

    def eager(self, shape: AttentionShape) -> Attention:
        wrappers = {
            window: self._wrapper(self._workspace, kv_layout="NHD", backend="fa2") for window in shape.windows
        }
        return _FlashInferAttention(shape, wrappers, self.stream)

    def fixed(self, shape: AttentionShape, rows: int, pages: int) -> Attention:
        if pages > len(self._page_ids):
            self._page_ids = self._zeros(pages)
        wrappers = {}
        for window in shape.windows:
            lengths = [self._zeros(size) for size in (rows + 1, rows + 1, rows)]
            wrappers[window] = self._wrapper(
                self._workspace,
                kv_layout="NHD",
                use_cuda_graph=True,
                qo_indptr_buf=lengths[0],
                paged_kv_indptr_buf=lengths[1],
                paged_kv_indices_buf=self._page_ids,
                paged_kv_last_page_len_buf=lengths[2],
                backend="fa2",
            )
        attention = _FlashInferAttention(shape, wrappers, self.stream)
        self._fit(attention, rows)
        return attention

    def _zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self.stream.device)

    def _fit(self, attention: _FlashInferAttention, rows: int) -> None:
        """Give the wrappers the workspace that their planner wants for full rows."""
        full = paged_rows([Span(0, 1, _PAGE)] * rows, attention.shape.page_size, 0)
        staging, given = Staging(self.stream), len(self._workspace)
        for window, wrapper in attention.wrappers.items():
            with staging.turn() as writer:
                where, how = attention.arguments(full, writer, window)
                needed, _ = wrapper.workspace_size(*where, **how)
            if needed > len(self._workspace):
                self._workspace = torch.zeros(needed, dtype=torch.uint8, device=self.stream.device)
            if needed > given:
                own = torch.zeros(_OWN, dtype=torch.uint8, device=self.stream.device)
                wrapper.reset_workspace_buffer(self._workspace, own)


class _FlashInferAttention:
    """A wrapper for each window that layers have."""

    def __init__(self, shape: AttentionShape, wrappers: dict[int | None, Any], stream: Stream) -> None:
        self.shape, self.wrappers, self.stream = shape, wrappers, stream
        self._copied: Fence | None = None

    def plan(self, rows: PagedRows, writer: Writer) -> None:
        if self._copied is not None:
            self._copied.wait()
        for window, wrapper in self.wrappers.items():
            where, how = self.arguments(rows, writer, window)
            wrapper.plan(*where, **how, non_blocking=True)
        self._copied = self.stream.fence()

    def run(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        out: torch.Tensor = self.wrappers[window].run(q.contiguous(), (keys, values))
        return out

    def arguments(
        self, rows: PagedRows, writer: Writer, window: int | None
    ) -> tuple[list[Any], dict[str, Any]]:
        """Of `plan`, and of `workspace_size`, which takes the same."""
        shape = self.shape
        (page_ids,) = writer.device(rows.kv_indices)
        where = [
            writer.host(rows.qo_indptr),
            writer.host(rows.kv_indptr),
            page_ids,
            writer.host(rows.last_page_len),
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.page_size,
        ]
        how = {
            "causal": shape.causal,
            "sm_scale": shape.scale,
            "window_left": -1 if window is None else window - 1,
            "q_data_type": shape.dtype,
            "kv_data_type": shape.dtype,
            "o_data_type": shape.dtype,
            "seq_lens": writer.host(rows.kv_lens),
            "max_token_per_sequence": rows.longest,
        }
        return where, how
