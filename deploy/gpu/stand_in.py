"""FlashInfer's paged-prefill wrapper in plain torch, as far as we call it: to try out scripts on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


class TorchWrapper:
    """Asserts what the documentation asks for: int32, host lengths, fixed buffers where a graph replays."""

    def __init__(
        self,
        workspace: torch.Tensor,
        layout: str,
        *,
        backend: str,
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
    ) -> None:
        assert layout == "NHD"
        assert backend == "fa2"
        buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        assert all(buffer is not None for buffer in buffers) == use_cuda_graph
        self.slots = None if qo_indptr_buf is None else len(qo_indptr_buf) - 1
        self.most_indices = None if paged_kv_indices_buf is None else len(paged_kv_indices_buf)
        self.most_rows: int | None = None

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        causal: bool,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        o_data_type: torch.dtype,
        sm_scale: float,
        seq_lens: torch.Tensor,
        max_token_per_sequence: int,
    ) -> None:
        parts = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(part.dtype == torch.int32 for part in parts)
        assert q_data_type == kv_data_type == o_data_type == torch.bfloat16
        assert max_token_per_sequence >= int(qo_indptr.diff().max())
        assert num_qo_heads % num_kv_heads == 0
        slots, rows = len(qo_indptr) - 1, int(qo_indptr[-1])
        assert len(paged_kv_indptr) == slots + 1
        assert len(paged_kv_last_page_len) == slots
        if self.slots is not None:
            assert slots == self.slots
            assert len(paged_kv_indices) <= (self.most_indices or 0)
            self.most_rows = rows if self.most_rows is None else self.most_rows
            assert rows <= self.most_rows
        self.tables = [part.clone() for part in parts]
        filled = (paged_kv_indptr.diff() - 1).clamp_min(0) * page_size + paged_kv_last_page_len
        assert torch.equal(filled.int(), seq_lens)
        self.causal, self.scale, self.page = causal, sm_scale, page_size

    def run(self, q: torch.Tensor, pool: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        rows, pages, ids, last = (part.tolist() for part in self.tables)
        assert self.most_rows is not None or len(q) == rows[-1]
        out = torch.zeros_like(q) if out is None else out
        for slot in range(len(rows) - 1):
            mine, own = slice(rows[slot], rows[slot + 1]), ids[pages[slot] : pages[slot + 1]]
            count = mine.stop - mine.start
            if not count:
                continue
            keys = (len(own) - 1) * self.page + last[slot]
            k, v = (part[own].flatten(0, 1)[:keys].transpose(0, 1) for part in pool)
            mask = None
            if self.causal:
                mask = torch.ones(count, keys, dtype=torch.bool).tril(keys - count)
            attended = F.scaled_dot_product_attention(
                q[mine].transpose(0, 1)[None],
                k[None],
                v[None],
                attn_mask=mask,
                scale=self.scale,
                enable_gqa=True,
            )
            out[mine] = attended[0].transpose(0, 1)
        return out
