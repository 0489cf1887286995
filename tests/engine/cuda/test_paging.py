"""Page tables as kernels want them, for any requests and any padding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cuda.paging import padded, paged_rows
from engine.native.draft import Span

SCRATCH = 1000


@st.composite
def spans(draw: st.DrawFn) -> tuple[list[Span], int]:
    size = draw(st.sampled_from([1, 3, 16]))
    out, page = [], 0
    for _ in range(draw(st.integers(0, 6))):
        start, count = draw(st.integers(0, 40)), draw(st.integers(1, 9))
        held = -(-(start + count) // size) + draw(st.integers(0, 3))  # pages beyond its rows, reserved
        out.append(Span(start, count, np.arange(page, page + held, dtype=np.int32)[::-1].copy()))
        page += held
    return out, size


@given(spans(), st.integers(0, 5), st.integers(0, 5))
@settings(deadline=None)
def test_every_row_is_found_where_it_was_written(case, more_rows, more_slots):
    own, size = case
    total = sum(span.count for span in own)
    rows = paged_rows(own, size, SCRATCH, total + more_rows, len(own) + more_slots)
    assert len(rows.slots) == len(rows.positions) == total + more_rows
    assert len(rows.qo_indptr) - 1 == len(rows.kv_lens) == len(rows.last_page_len) == len(own) + more_slots
    row = 0
    for i, span in enumerate(own):
        assert (rows.qo_indptr[i], rows.qo_indptr[i + 1]) == (row, row + span.count)
        pages = rows.kv_indices[rows.kv_indptr[i] : rows.kv_indptr[i + 1]]
        length = span.start + span.count
        assert rows.kv_lens[i] == length == (len(pages) - 1) * size + rows.last_page_len[i]
        assert 1 <= rows.last_page_len[i] <= size
        for position in range(span.start, length):
            assert rows.positions[row] == position
            # where a kernel looks for this position, and where the row's K and V went
            assert pages[position // size] * size + position % size == rows.slots[row]
            row += 1
    assert (rows.slots[row:] == SCRATCH * size).all()
    assert (rows.positions[row:] == 0).all()
    empty = slice(len(own), None)
    assert (np.diff(rows.qo_indptr)[empty] == 0).all()
    assert (np.diff(rows.kv_indptr)[empty] == 0).all()
    assert (rows.last_page_len[empty] == 0).all()
    assert (rows.kv_lens[empty] == 0).all()
    assert rows.longest == max((span.count for span in own), default=0)
    assert {array.dtype for array in (rows.slots, rows.positions)} == {np.dtype(np.int64)}
    of_kernels = (rows.qo_indptr, rows.kv_indptr, rows.kv_indices, rows.last_page_len, rows.kv_lens)
    assert {array.dtype for array in of_kernels} == {np.dtype(np.int32)}


def test_what_does_not_fit_is_refused():
    own = [Span(0, 3, np.zeros(1, dtype=np.int32))]
    with pytest.raises(ValueError, match="3 rows of 1 requests"):
        paged_rows(own, 16, SCRATCH, rows=2, slots=2)
    with pytest.raises(ValueError):
        paged_rows(own * 2, 16, SCRATCH, rows=8, slots=1)


def test_padding_is_zeros():
    assert padded(np.array([3, 4], dtype=np.int32), 4).tolist() == [3, 4, 0, 0]
