"""Both kinds of paged attention against dense attention, and the wrappers' rules."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.cuda.attention import AttentionShape
from engine.cuda.flashinfer import FlashInferBackend, FlashInferMissing, wrapper_class
from engine.cuda.kv_pool import KVPool
from engine.cuda.paging import paged_rows
from engine.cuda.sdpa import SdpaBackend
from engine.cuda.staging import Staging
from engine.native.draft import Span
from tests.engine.cuda.fake_flashinfer import fake_wrapper
from tests.engine.cuda.fake_stream import FakeStream

SIZE, HEADS, KV_HEADS, DIM = 4, 6, 2, 8
LENGTHS = [(0, 5), (11, 1), (7, 4), (0, 1)]  # start, rows


def world(seed: int = 0):
    """Spans over scattered pages, a pool full of numbers, queries."""
    torch.manual_seed(seed)
    pages = np.random.default_rng(seed).permutation(20).astype(np.int32)
    spans = [Span(start, count, pages[5 * i : 5 * i + 5]) for i, (start, count) in enumerate(LENGTHS)]
    pool = KVPool(1, 20, SIZE, KV_HEADS, DIM, torch.float64, torch.device("cpu"))
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_()
    return spans, pool, torch.randn(sum(count for _, count in LENGTHS), HEADS, DIM, dtype=torch.float64)


def dense(spans, pool, q, window, causal):
    """The same without pages."""
    out, row = [], 0
    for span in spans:
        length = span.start + span.count
        places = torch.from_numpy(span.pages).long().repeat_interleave(SIZE) * SIZE
        places = (places + torch.arange(len(places)) % SIZE)[:length]
        k, v = (
            kind[0].flatten(0, 1)[places].repeat_interleave(HEADS // KV_HEADS, 1)
            for kind in (pool.keys, pool.values)
        )
        scores = torch.einsum("qhd,khd->hqk", q[row : row + span.count], k) / math.sqrt(DIM)
        query, key = torch.arange(span.start, length)[:, None], torch.arange(length)
        seen = key <= query if causal else torch.ones(span.count, length, dtype=torch.bool)
        if window is not None:
            seen = seen & (key > query - window)
        out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
        row += span.count
    return torch.cat(out)


def backend(name: str, stream: FakeStream):
    return SdpaBackend() if name == "sdpa" else FlashInferBackend(stream, fake_wrapper(stream), workspace=16)


@pytest.mark.parametrize("name", ["flashinfer", "sdpa"])
@pytest.mark.parametrize(("window", "causal"), [(None, True), (3, True), (None, False)])
def test_ragged_rows_over_pages_are_dense_attention(name, window, causal):
    spans, pool, q = world()
    stream = FakeStream()
    shape = AttentionShape(HEADS, KV_HEADS, DIM, SIZE, torch.float64, (window,), causal)
    attention = backend(name, stream).eager(shape)
    with Staging(stream).turn() as writer:
        attention.plan(paged_rows(spans, SIZE, pool.scratch), writer)
    found = attention.run(q, pool.keys[0], pool.values[0], window)
    assert torch.allclose(found, dense(spans, pool, q, window, causal), atol=1e-12)


def test_layers_with_and_without_a_window_have_plans_of_their_own():
    spans, pool, q = world()
    stream = FakeStream()
    shape = AttentionShape(HEADS, KV_HEADS, DIM, SIZE, torch.float64, (None, 3))
    attention = backend("flashinfer", stream).eager(shape)
    with Staging(stream).turn() as writer:
        attention.plan(paged_rows(spans, SIZE, pool.scratch), writer)
    for window in (None, 3):
        found = attention.run(q, pool.keys[0], pool.values[0], window)
        assert torch.allclose(found, dense(spans, pool, q, window, True), atol=1e-12)


def test_a_fixed_attention_takes_fewer_rows_and_requests_than_it_has():
    spans, pool, q = world()
    stream = FakeStream()
    shape = AttentionShape(HEADS, KV_HEADS, DIM, SIZE, torch.float64)
    rows, staging = len(q) + 3, Staging(stream)
    attention = backend("flashinfer", stream).fixed(shape, rows, 40)
    scratch = np.full(1, pool.scratch, dtype=np.int32)
    for own in ([Span(0, 1, scratch)] * rows, spans, spans[:2]):
        with staging.turn() as writer:
            attention.plan(paged_rows(own, SIZE, pool.scratch, rows, rows), writer)
    (wrapper,) = attention.wrappers.values()
    wrapper.total = rows  # a replay: `run` was called with all rows, before
    some = sum(span.count for span in spans[:2])
    padded = torch.cat((q, q[:3]))
    found = attention.run(padded, pool.keys[0], pool.values[0], None)
    assert torch.allclose(found[:some], dense(spans[:2], pool, q[:some], None, True), atol=1e-12)
    assert not found[some:].any(), "rows of no request are not written"


def test_the_planner_says_how_much_workspace_there_must_be():
    stream = FakeStream()
    made = backend("flashinfer", stream)
    shape = AttentionShape(HEADS, KV_HEADS, DIM, SIZE, torch.float64)
    for rows in (12, 5):
        made.fixed(shape, rows, 40)
    assert len(made._workspace) == 12 * HEADS * (DIM + 1) * 4


def test_planning_twice_waits_for_the_schedule_to_be_copied():
    spans, pool, _ = world()
    stream = FakeStream()
    shape = AttentionShape(HEADS, KV_HEADS, DIM, SIZE, torch.float64)
    attention = backend("flashinfer", stream).eager(shape)
    staging, rows = Staging(stream), paged_rows(spans, SIZE, pool.scratch)
    for _ in range(3):
        with staging.turn() as writer:
            attention.plan(rows, writer)


def test_the_fake_notices_a_plan_over_one_that_was_not_copied():
    spans, pool, _ = world()
    stream = FakeStream()
    shape = AttentionShape(HEADS, KV_HEADS, DIM, SIZE, torch.float64)
    attention = backend("flashinfer", stream).eager(shape)
    staging, rows = Staging(stream), paged_rows(spans, SIZE, pool.scratch)
    with staging.turn() as writer:
        attention.plan(rows, writer)
        attention._copied = None  # forget the fence
        with pytest.raises(AssertionError, match="planned again"):
            attention.plan(rows, writer)


def test_without_flashinfer_the_message_says_what_to_do(monkeypatch):
    def missing(name: str):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr("engine.cuda.flashinfer.import_module", missing)
    with pytest.raises(FlashInferMissing, match=r"No module named 'flashinfer'.*dspark-server\[gpu\]"):
        wrapper_class()


def test_attention_in_torch_is_not_for_graphs():
    shape = AttentionShape(HEADS, KV_HEADS, DIM, SIZE, torch.float32)
    assert not SdpaBackend().capturable
    with pytest.raises(NotImplementedError):
        SdpaBackend().fixed(shape, 4, 4)
