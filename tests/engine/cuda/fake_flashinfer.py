"""FlashInfer's prefill wrapper in torch: every documented precondition is an assertion."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import library

from tests.engine.cuda.fake_stream import FakeStream

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # the last two for exact tests only


@library.custom_op("dspark_test::paged_attention", mutates_args=())
def paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    qo_indptr: torch.Tensor,
    kv_indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    scale: float,
    window_left: int,
    causal: bool,
) -> torch.Tensor:
    """A kernel: may look at its arrays when it runs. Rows of no request stay zero."""
    out = torch.zeros_like(q)
    size, group = keys.shape[1], q.shape[1] // keys.shape[2]
    starts, firsts = qo_indptr.tolist(), kv_indptr.tolist()
    for i, last in enumerate(last_page_len.tolist()):
        rows, held = starts[i + 1] - starts[i], firsts[i + 1] - firsts[i]
        if not rows:
            continue
        length = (held - 1) * size + last
        pages = indices[firsts[i] : firsts[i + 1]].long()
        k, v = (
            pool[pages].flatten(0, 1)[:length].repeat_interleave(group, 1).transpose(0, 1)
            for pool in (keys, values)
        )
        query = torch.arange(length - rows, length)[:, None]
        key = torch.arange(length)
        seen = key <= query if causal else torch.ones(rows, length, dtype=torch.bool)
        if window_left >= 0:
            seen = seen & (key >= query - window_left)
        scores = (q[starts[i] : starts[i + 1]].transpose(0, 1) @ k.transpose(1, 2)) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[starts[i] : starts[i + 1]] = (weights @ v).transpose(0, 1)
    return out


def _needed(rows: int, heads: int, dim: int) -> int:
    """Bytes of partial results."""
    return rows * heads * (dim + 1) * 4


class FakeWrapper:
    """Bound to a stream by `fake_wrapper`."""

    stream: FakeStream

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
    ) -> None:
        assert kv_layout == "NHD"
        assert backend == "fa2", "auto means something else from version to version"
        assert custom_mask_buf is None, "its presence switches the mask"
        assert mask_indptr_buf is None
        self.use_cuda_graph = use_cuda_graph
        self._workspace(float_workspace_buffer)
        buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        self.buffers: list[torch.Tensor] = []
        if use_cuda_graph:
            for buffer in buffers:
                assert buffer is not None
                assert buffer.dtype == torch.int32
                assert not self.stream.is_pinned(buffer), "a kernel reads device memory"
                self.buffers.append(buffer)
            self.slots = len(self.buffers[0]) - 1
            assert len(self.buffers[1]) == self.slots + 1
            assert len(self.buffers[3]) == self.slots
        self.most_rows: int | None = None
        self.total: int | None = None
        self.plans = 0
        self._schedule = self.stream.pinned(64)
        self._copied = 0

    def _workspace(self, buffer: torch.Tensor) -> None:
        assert buffer.dtype == torch.uint8
        assert buffer.data_ptr() % 16 == 0
        self.float_workspace = buffer

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None:
        assert int_workspace_buffer.dtype == torch.uint8
        assert len(int_workspace_buffer) >= 8 << 20
        self._workspace(float_workspace_buffer)

    def workspace_size(self, *where: Any, **how: Any) -> tuple[int, int]:
        assert "non_blocking" not in how, "not an argument of workspace_size"
        return _needed(int(where[0][-1]), where[4], where[6]), 1024

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        seq_lens: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
    ) -> None:
        lengths = (qo_indptr, paged_kv_indptr, paged_kv_last_page_len, seq_lens)
        for tensor in lengths:
            assert tensor is not None
            assert tensor.dtype == torch.int32
            assert self.stream.is_pinned(tensor), "lengths of a device are copied back, which waits"
        assert paged_kv_indices.dtype == torch.int32
        assert not self.stream.is_pinned(paged_kv_indices), "page ids are wanted on the device"
        assert q_data_type in DTYPES, "the default is float16"
        assert kv_data_type == o_data_type == q_data_type
        assert num_qo_heads % num_kv_heads == 0
        self._check_lengths(lengths, paged_kv_indices, page_size, max_token_per_sequence)
        assert self.stream.done >= self._copied, "planned again before the schedule's copy was executed"
        number = self.stream.queue()
        self.plans += 1
        self._schedule.fill_(self.plans % 251)
        self.stream.watch(number, self._schedule)
        self.total = int(qo_indptr[-1])
        if self.use_cuda_graph:
            assert len(qo_indptr) - 1 == self.slots, "the number of request slots is fixed"
            self.most_rows = self.total if self.most_rows is None else self.most_rows
            assert self.total <= self.most_rows, "more rows than the first plan had"
            assert len(paged_kv_indices) <= len(self.buffers[2])
            for buffer, source in zip(
                self.buffers,
                (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len),
                strict=True,
            ):
                buffer[: len(source)].copy_(source)
                if self.stream.is_pinned(source):
                    self.stream.watch(number, source)
        else:
            self.buffers = [
                qo_indptr.clone(),
                paged_kv_indptr.clone(),
                paged_kv_indices.clone(),
                paged_kv_last_page_len.clone(),
            ]
            for source in (qo_indptr, paged_kv_indptr, paged_kv_last_page_len):
                self.stream.watch(number, source)
        if seq_lens is not None:
            self.stream.watch(number, seq_lens)
        self._copied = number
        if self.use_cuda_graph:  # an eager plan may do without
            assert _needed(self.most_rows or 0, num_qo_heads, head_dim_qk) <= len(self.float_workspace)
        self.dtype, self.causal, self.window_left = q_data_type, causal, window_left
        self.scale = sm_scale if sm_scale is not None else 1.0 / math.sqrt(head_dim_qk)
        self.shape = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)

    @staticmethod
    def _check_lengths(
        lengths: tuple[torch.Tensor | None, ...], ids: torch.Tensor, page_size: int, longest: int | None
    ) -> None:
        rows, pages, last, total = (tensor.tolist() for tensor in lengths if tensor is not None)
        assert rows[0] == pages[0] == 0
        assert rows == sorted(rows)
        assert pages == sorted(pages)
        assert len(ids) == pages[-1]
        assert len(rows) == len(pages) == len(last) + 1
        for i, on_last in enumerate(last):
            count, held = rows[i + 1] - rows[i], pages[i + 1] - pages[i]
            if held:
                assert 1 <= on_last <= page_size
                assert total[i] == (held - 1) * page_size + on_last
                assert 0 < count <= total[i], "a row sees at least itself"
            else:
                assert (count, on_last, total[i]) == (0, 0, 0), "a slot without pages has no rows"
        assert longest == max((b - a for a, b in itertools.pairwise(rows)), default=0)

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: None = None
    ) -> torch.Tensor:
        keys, values = paged_kv_cache
        heads, kv_heads, dim, page_size = self.shape
        assert q.shape == (self.total, heads, dim), "q must have the rows of the last plan"
        assert q.is_contiguous()
        assert q.dtype == keys.dtype == values.dtype == self.dtype
        assert keys.shape[1:] == values.shape[1:] == (page_size, kv_heads, dim)
        assert keys.stride() == values.stride(), "unequal strides are another kernel"
        found: torch.Tensor = paged_attention(
            q, keys, values, *self.buffers, self.scale, self.window_left, self.causal
        )
        return found


def fake_wrapper(stream: FakeStream) -> type[FakeWrapper]:
    """The class that stands for FlashInfer's on this stream."""
    return type("BoundWrapper", (FakeWrapper,), {"stream": stream})
