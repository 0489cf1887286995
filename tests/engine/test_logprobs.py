"""Reports of log probabilities: the kernels' against torch's, and both against double precision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import logprobs as module
from engine.logprobs import logprobs
from engine.native.loader import native_library
from engine.outputs import TokenLogprob


def close(found: TokenLogprob, wanted: TokenLogprob) -> None:
    assert (found.token_id, found.rank) == (wanted.token_id, wanted.rank)
    assert found.logprob == pytest.approx(wanted.logprob, abs=2e-5)
    assert [token for token, _ in found.top] == [token for token, _ in wanted.top]
    assert [value for _, value in found.top] == pytest.approx([v for _, v in wanted.top], abs=2e-5)


def plain(row: torch.Tensor, token: int, top: int, ranked: bool) -> TokenLogprob:
    """By sorting all of it."""
    logp = row.double() - row.double().logsumexp(0)
    order = sorted(range(len(row)), key=lambda i: (-float(row[i]), i))
    best = tuple((i, float(logp[i])) for i in order[:top])
    rank = 1 + sum(float(value) > float(row[token]) for value in row) if ranked else None
    return TokenLogprob(token, float(logp[token]), best, rank)


@pytest.mark.skipif(native_library() is None, reason="kernels were not built")
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_reports_of_the_kernels(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 700))
    count = data.draw(st.integers(1, 5))
    torch.manual_seed(data.draw(st.integers(0, 2**31)))
    step = data.draw(st.sampled_from((0.0, 1.0, 5.0)))  # coarse rows are full of ties
    logits = torch.randn(count, size) * data.draw(st.sampled_from((0.1, 3.0, 40.0)))
    logits = (logits / step).round() * step if step else logits
    if data.draw(st.booleans()):
        logits[:, : size // 3] = -torch.inf
    tokens = [data.draw(st.integers(0, size - 1)) for _ in range(count)]
    tops = [data.draw(st.integers(0, min(size, 25))) for _ in range(count)]
    ranked = data.draw(st.booleans())
    found = logprobs(list(logits.unbind(0)), tokens, tops, ranked)
    for report, row, token, top in zip(found, logits, tokens, tops, strict=True):
        close(report, plain(row, token, top, ranked))


@pytest.mark.parametrize("ranked", [False, True])
def test_reports_in_torch_beyond_one_stack(monkeypatch: pytest.MonkeyPatch, ranked: bool) -> None:
    monkeypatch.setattr(module.native, "kernels_for", lambda row: None)
    count = 2 * module._TOGETHER + 3
    logits = torch.randn(count, 64)
    tokens, tops = [i % 64 for i in range(count)], [i % 6 for i in range(count)]
    found = logprobs(list(logits.unbind(0)), tokens, tops, ranked)
    assert len(found) == count
    for report, row, token, top in zip(found, logits, tokens, tops, strict=True):
        close(report, plain(row, token, top, ranked))


def test_of_nothing_nothing_is_said() -> None:
    assert logprobs([], [], []) == []


def test_a_row_does_not_depend_on_those_beside_it() -> None:
    logits = torch.randn(7, 1000)
    together = logprobs(list(logits.unbind(0)), [3] * 7, [5] * 7)
    assert together == [logprobs([row], [3], [5])[0] for row in logits]
