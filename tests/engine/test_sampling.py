"""Processed distributions against their plain restatement, penalties over drafts, and draws at the edges."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st

from engine.draws import draw
from engine.native import loader
from engine.params import SamplingParams
from engine.sampling import SamplingState, probabilities
from tests.engine.harness import one_thread  # noqa: F401
from tests.engine.plain_law import adjusted, filtered, plain_law

quick = settings(max_examples=150, deadline=None, derandomize=True)


def process(logits: list[float], params: SamplingParams) -> list[float]:
    return list(probabilities(torch.tensor([logits], dtype=torch.float64), [params])[0].tolist())


def kept(law: Any) -> list[int]:
    return [token for token, p in enumerate(law) if p > 0.0]


def assert_same_law(found: list[float], expected: list[float]) -> None:
    assert sum(found) == pytest.approx(1.0, abs=1e-12)
    assert found == pytest.approx(expected, abs=1e-12)
    for p, q in zip(found, expected, strict=True):
        assert (p > 0.0) == (q > 0.0) or max(p, q) < 1e-290


# ---- the processed distribution

#: multiples of 1/8, so that many tie, and what cannot be said
logit = st.one_of(st.integers(-160, 160).map(lambda n: n / 8), st.sampled_from([0.0, 1.0, -math.inf]))
filters = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(1.0), st.floats(0.05, 2.0)),
    top_k=st.one_of(st.sampled_from([0, -1]), st.integers(1, 400)),
    top_p=st.one_of(st.just(1.0), st.floats(0.001, 0.9999)),
    min_p=st.one_of(st.just(0.0), st.floats(1e-6, 1.0)),
)


@quick
@given(st.lists(logit, min_size=1, max_size=300), filters)
@example([0.0] * 300, SamplingParams(top_k=7))
@example([-math.inf, 2.0, 2.0, -math.inf], SamplingParams(top_p=0.3))
@example([1.0, 1.0, 0.0], SamplingParams(min_p=1.0))
@example([5.0], SamplingParams(top_k=3, top_p=0.01, min_p=1.0))
def test_filters_do_what_their_plain_restatement_says(logits: list[float], params: SamplingParams) -> None:
    assume(max(logits) > -math.inf)
    expected, margin = filtered(logits, params)
    assume(margin > 1e-9)
    assert_same_law(process(logits, params), expected)


@pytest.fixture(params=["native", "torch"])
def single(request: pytest.FixtureRequest) -> Iterator[None]:
    """Filters of fp32 rows in the kernels, or in torch."""
    if request.param == "native" and loader.native_library() is None:
        pytest.skip("the kernels were not built")
    library = loader.native_library if request.param == "native" else lambda: None
    with mock.patch.object(loader, "native_library", library):
        yield


@settings(quick, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much])
@given(st.lists(logit, min_size=1, max_size=300), filters)
@example([0.0] * 300, SamplingParams(top_k=7))
@example([-math.inf, 2.0, 2.0, -math.inf], SamplingParams(top_p=0.3))
@example([1.0, 1.0, 0.0], SamplingParams(min_p=1.0))
@example([160.0, 0.0, -160.0], SamplingParams(top_k=2))
def test_filters_do_so_in_single_precision(single: None, logits: list[float], params: SamplingParams) -> None:
    assume(max(logits) > -math.inf)
    expected, margin = filtered(logits, params)
    assume(margin > 1e-5)
    found = probabilities(torch.tensor([logits], dtype=torch.float32), [params])[0].tolist()
    assert sum(found) == pytest.approx(1.0, abs=1e-5)
    assert found == pytest.approx(expected, rel=2e-4, abs=1e-7)
    for p, q in zip(found, expected, strict=True):
        assert (p > 0.0) == (q > 0.0) or max(p, q) < 1e-36


def test_filters_of_wide_rows_do_so_in_single_precision(single: None) -> None:
    rng = np.random.default_rng(5)
    for vocab, spread in ((300, 0.1), (5000, 0.5), (5000, 6.0), (49155, 2.0)):
        logits = (rng.normal(size=vocab) * spread).round(2).astype(np.float32)
        for params in (
            SamplingParams(top_k=vocab // 3),
            SamplingParams(top_p=0.9371),
            SamplingParams(min_p=0.01234),
            SamplingParams(top_k=vocab // 2, top_p=0.9371, min_p=1e-4),
        ):
            expected = np.array(filtered(logits.tolist(), params)[0])
            found = probabilities(torch.from_numpy(logits)[None], [params])[0].numpy()
            assert abs((found > 0).sum() - (expected > 0).sum()) <= 1 + vocab // 10_000
            assert 0.5 * np.abs(found - expected).sum() < 1e-4


@pytest.mark.parametrize("vocab", [63, 64, 65, 500, 512, 513, 3000, 5000])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 6.0])
def test_wide_rows_are_filtered_like_narrow_ones(vocab: int, spread: float) -> None:
    """Flat rows keep more tokens than are looked at first (64, then 512, then 4096)."""
    rng = np.random.default_rng([vocab, int(spread * 100)])
    logits = (rng.normal(size=vocab) * spread).round(3).tolist()
    for params in (
        SamplingParams(top_p=0.97),
        SamplingParams(top_p=0.9999),
        SamplingParams(top_p=0.4321),
        SamplingParams(min_p=0.5),
        SamplingParams(min_p=0.0123),
        SamplingParams(min_p=0.0123, top_p=0.987),
        SamplingParams(top_k=vocab - 1, top_p=0.987),
        SamplingParams(top_k=100, min_p=0.0123, top_p=0.9),
    ):
        expected, margin = filtered(logits, params)
        if margin > 1e-12 * vocab:
            assert_same_law(process(logits, params), expected)
        else:  # ties at a threshold: how many are kept hangs on rounding
            assert abs(len(kept(process(logits, params))) - len(kept(expected))) <= 1


def test_wide_rows_are_indeed_wide() -> None:
    flat = [0.0] * 5000
    assert len(kept(process(flat, SamplingParams(top_p=0.97)))) > 4096
    assert len(kept(process(flat, SamplingParams(min_p=0.5)))) == 5000


def test_extreme_logits() -> None:
    for logits, params, expected in (
        ([1e4, 0.0, -1e4], SamplingParams(), [1.0, 0.0, 0.0]),
        ([1e30, 1e30, 0.0], SamplingParams(temperature=0.01), [0.5, 0.5, 0.0]),
        ([-1e30, -1e30, -math.inf], SamplingParams(top_p=0.9), [0.5, 0.5, 0.0]),
        ([-math.inf, 3.0, -math.inf], SamplingParams(top_k=2), [0.0, 1.0, 0.0]),
        ([-math.inf, 0.0, 0.0], SamplingParams(min_p=0.1, top_k=3, top_p=0.99), [0.0, 0.5, 0.5]),
    ):
        assert process(logits, params) == pytest.approx(expected, abs=1e-15)
        assert_same_law(process(logits, params), plain_law(logits, params))


@pytest.mark.parametrize("top_k", [4, 5, 10**9, 2**62, 0, -1])
def test_a_top_k_of_the_vocabulary_or_more_keeps_everything(top_k: int) -> None:
    logits = [0.5, -1.0, 3.0, 0.0]
    assert process(logits, SamplingParams(top_k=top_k)) == pytest.approx(process(logits, SamplingParams()))


def test_a_tiny_top_p_keeps_one_token() -> None:
    assert kept(process([0.0, 1.0, 0.5], SamplingParams(top_p=1e-9))) == [1]
    assert kept(process([0.0] * 1000, SamplingParams(top_p=1e-9))) == [0]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_nucleus_that_is_reached_exactly_is_enough(count: int) -> None:
    """Four even tokens of exactly 1/4, alone and below a min-p that forbids the fifth."""
    assert kept(process([0.0] * 4, SamplingParams(top_p=count / 4))) == list(range(count))
    assert kept(process([0.0] * 4 + [-9.0], SamplingParams(top_p=count / 4, min_p=0.5))) == list(range(count))
    assert kept(process([0.0] * 4 + [-9.0], SamplingParams(top_p=count / 4, top_k=4))) == list(range(count))


def test_a_min_p_of_one_keeps_the_ties_at_the_top() -> None:
    assert kept(process([2.0, 1.0, 2.0, 1.999], SamplingParams(min_p=1.0))) == [0, 2]


def test_ties_at_a_cut_go_to_the_lowest_ids() -> None:
    logits = [1.0, 2.0, 1.0, 1.0, 2.0, 1.0]
    assert kept(process(logits, SamplingParams(top_k=1))) == [1]
    assert kept(process(logits, SamplingParams(top_k=3))) == [0, 1, 4]
    assert kept(process(logits, SamplingParams(top_k=5))) == [0, 1, 2, 3, 4]
    assert kept(process([0.0] * 10, SamplingParams(top_p=0.35))) == [0, 1, 2, 3]


def test_min_p_and_top_k_come_before_top_p() -> None:
    """top_p counts the mass that the others left."""
    logits = np.log([0.4, 0.3, 0.2, 0.1]).tolist()
    assert kept(process(logits, SamplingParams(top_p=0.69))) == [0, 1]
    assert kept(process(logits, SamplingParams(top_p=0.55, top_k=2))) == [0]  # .4 of .7
    assert kept(process(logits, SamplingParams(top_p=0.55))) == [0, 1]
    assert kept(process(logits, SamplingParams(top_p=0.55, min_p=0.7))) == [0]
    assert kept(process(logits, SamplingParams(top_p=0.999, min_p=0.7))) == [0, 1]


def test_temperature_comes_before_the_filters() -> None:
    logits = np.log([0.6, 0.4]).tolist()
    assert kept(process(logits, SamplingParams(min_p=0.6))) == [0, 1]
    assert kept(process(logits, SamplingParams(min_p=0.6, temperature=0.5))) == [0]


def test_rows_in_single_precision_are_laws_too(single: None) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, 5000, generator=generator) * 4
    params = [
        SamplingParams(),
        SamplingParams(top_k=50),
        SamplingParams(top_p=0.95),
        SamplingParams(min_p=1e-3),
    ]
    p = probabilities(logits, params * 2)
    assert p.dtype == torch.float32
    assert (p.sum(-1) - 1.0).abs().max() < 1e-5
    for row, z, each in zip(p.tolist(), logits.tolist(), params * 2, strict=True):
        assert row == pytest.approx(filtered(z, each)[0], abs=1e-6)


# ---- rows are independent of one another


def mixed_params(rng: np.random.Generator, count: int, vocab: int) -> list[SamplingParams]:
    choices: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_k": vocab // 2},
        {"top_p": 0.9},
        {"top_p": 0.99999},
        {"min_p": 0.05},
        {"min_p": 1e-5, "top_p": 0.999},
        {"top_k": 100, "top_p": 0.8, "min_p": 0.01, "temperature": 1.5},
    ]
    return [SamplingParams(**choices[rng.integers(len(choices))]) for _ in range(count)]


@pytest.mark.parametrize("vocab", [7, 100, 1000, 6000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_is_the_same_bit_for_bit_in_any_batch(vocab: int, dtype: torch.dtype, single: None) -> None:
    rng = np.random.default_rng(vocab)
    logits = torch.from_numpy(rng.normal(size=(24, vocab)) * rng.uniform(0.1, 4, size=(24, 1))).to(dtype)
    params = mixed_params(rng, 24, vocab)
    together = probabilities(logits.clone(), params)
    for i in range(24):
        assert torch.equal(together[i], probabilities(logits[i : i + 1].clone(), params[i : i + 1])[0])
    order = rng.permutation(24)[:13]
    some = probabilities(logits[order].clone(), [params[i] for i in order])
    assert torch.equal(some, together[order])


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def test_a_row_of_a_real_vocabulary_is_the_same_bit_for_bit_alone(single: None) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 49152, generator=generator) * 3
    with threads(2):
        for params in (SamplingParams(top_p=0.9), SamplingParams(top_k=50), SamplingParams(min_p=1e-6)):
            together = probabilities(logits.clone(), [params] * 5)
            for i in range(5):
                assert torch.equal(together[i], probabilities(logits[i : i + 1].clone(), [params])[0])


def test_a_nucleus_does_not_depend_on_the_top_k_of_others(single: None) -> None:
    """25 tokens of 1/25: the float32 row sums to slightly less or more than 1."""
    logits = torch.full((2, 1000), -torch.inf)
    logits[:, :25] = 0.0
    for part in range(1, 25):
        params = SamplingParams(top_p=part / 25)
        alone = probabilities(logits[:1].clone(), [params])[0]
        crowd = probabilities(logits.clone(), [params, SamplingParams(top_k=999)])[0]
        assert torch.equal(alone, crowd)


def test_rows_without_filters_are_left_alone_by_those_with() -> None:
    logits = torch.randn(3, 200, generator=torch.Generator().manual_seed(1))
    p = probabilities(logits, [SamplingParams(), SamplingParams(top_k=2), SamplingParams(temperature=2.0)])
    assert torch.equal(p[0], probabilities(logits[:1], [SamplingParams()])[0])
    assert torch.allclose(p[0], torch.softmax(logits[0], -1), rtol=1e-5)
    assert torch.equal(p[2], probabilities(logits[2:], [SamplingParams(temperature=2.0)])[0])
    assert len(kept(p[1])) == 2


# ---- what depends on the tokens before

penalties = st.builds(
    SamplingParams,
    presence_penalty=st.sampled_from([0.0, 0.5, -1.25, 2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.25, -0.5, 2.0]),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.5, 10.0]),
    logit_bias=st.dictionaries(st.integers(0, 11), st.integers(-400, 400).map(lambda n: n / 4), max_size=4),
    min_tokens=st.integers(0, 6),
    allowed_token_ids=st.none() | st.lists(st.integers(0, 11), min_size=1, max_size=12).map(tuple),
    bad_words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=4).map(tuple),
)
#: of few tokens more often than not, so that bad words come up
text = st.lists(st.integers(0, 3) | st.integers(0, 11), max_size=10)


def adjust(state: SamplingState, logits: list[float]) -> list[float]:
    row = torch.tensor(logits, dtype=torch.float64)
    state.adjust(row)
    return list(row.tolist())


@quick
@given(st.lists(logit, min_size=12, max_size=12), penalties, text, text, st.sets(st.integers(0, 11)))
def test_adjustments_count_the_prompt_and_every_token_since(
    logits: list[float], params: SamplingParams, prompt: list[int], output: list[int], stop_ids: set[int]
) -> None:
    state = SamplingState(params, 12, frozenset(stop_ids), prompt)
    for length in range(len(output) + 1):
        expected = adjusted(logits, params, prompt, output[:length], stop_ids)
        assert adjust(state, logits) == pytest.approx(expected, rel=1e-12, abs=1e-12)
        assert adjust(state, logits) == adjust(state, logits), "looking changed the state"
        if not state.adjusts:
            assert expected == logits
        if length < len(output):
            state.advance(output[length])
    assert state.generated == len(output)


@quick
@given(penalties, text, text, text)
def test_a_fork_runs_ahead_over_drafts_alone(
    params: SamplingParams, output: list[int], drafts: list[int], others: list[int]
) -> None:
    logits = [((7 * token) % 12 - 5) / 4 for token in range(12)]
    stop_ids = frozenset({2, 5})
    state = SamplingState(params, 12, stop_ids, (1, 1, 3), choice=4, stream=(1, 2, 3, 4))
    for token in output:
        state.advance(token)
    before = adjust(state, logits)
    ahead, elsewhere = state.fork(), state.fork()
    for token in drafts:
        ahead.advance(token)
    assert adjust(state, logits) == before
    assert state.generated == len(output)
    for token in others:
        elsewhere.advance(token)
    for fork, tail in ((ahead, drafts), (elsewhere, others), (state, [])):
        expected = adjusted(logits, params, (1, 1, 3), output + tail, stop_ids)
        assert adjust(fork, logits) == pytest.approx(expected, rel=1e-12, abs=1e-12)
        assert fork.generated == len(output) + len(tail)
        assert (fork.choice, fork.stream, fork.stop_ids) == (4, (1, 2, 3, 4), stop_ids)
    state.advance(7)
    assert ahead.generated == len(output) + len(drafts)


def test_penalties_on_a_plain_example() -> None:
    """Repetition counts the prompt; presence and frequency count the output only."""
    logits = [1.0, 1.0, 1.0, -1.0]
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.125)
    state = SamplingState(params, 4, frozenset(), prompt=(0, 3, 3))
    assert adjust(state, logits) == [0.5, 1.0, 1.0, -2.0]
    state.advance(1)
    state.advance(1)
    assert adjust(state, logits) == [0.5, 0.5 - 0.25 - 0.25, 1.0, -2.0]


def test_min_tokens_forbids_the_stop_tokens_until_then() -> None:
    state = SamplingState(SamplingParams(min_tokens=2), 3, frozenset({0, 2}))
    for length in range(4):
        expected = [-math.inf, 1.0, -math.inf] if length < 2 else [1.0, 1.0, 1.0]
        assert adjust(state, [1.0, 1.0, 1.0]) == expected
        state.advance(1)


def test_a_bias_may_forbid_and_does_not_come_back() -> None:
    state = SamplingState(SamplingParams(logit_bias={1: -100.0, 2: 100.0}), 3, frozenset())
    assert adjust(state, [0.0, 0.0, 0.0]) == [0.0, -100.0, 100.0]
    assert not SamplingState(SamplingParams(), 3, frozenset({1})).adjusts


def test_bad_words_on_a_plain_example() -> None:
    """A single token never comes, the end of a phrase not behind its beginning in the output."""
    params = SamplingParams(bad_words=((0,), (1, 2, 3)))
    state = SamplingState(params, 4, frozenset(), prompt=(1, 2))
    for token, last in ((1, 0.0), (1, 0.0), (2, 0.0), (1, -math.inf), (2, 0.0)):
        assert adjust(state, [0.0] * 4) == [-math.inf, 0.0, 0.0, last]
        state.advance(token)
    assert adjust(state, [0.0] * 4) == [-math.inf, 0.0, 0.0, -math.inf]
    assert SamplingState(SamplingParams(allowed_token_ids=(2,)), 4, frozenset()).adjusts


# ---- draws


def draw_one(weights: list[float], u: float, dtype: torch.dtype = torch.float64) -> int:
    return int(draw(torch.tensor([weights], dtype=dtype), torch.tensor([u], dtype=torch.float64))[0])


BELOW_ONE = 1.0 - 2.0**-53


@pytest.mark.parametrize("vocab", [1, 2, 255, 256, 257, 511, 512, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_draws_invert_the_cumulative_sum_at_every_edge(vocab: int, dtype: torch.dtype) -> None:
    """Whole weights whose sum is a power of two, so that u = k / sum hits every edge exactly."""
    rng = np.random.default_rng(vocab)
    weights = np.where(rng.random(vocab) < 0.5, 0, rng.integers(1, 9, vocab))
    total = 2 ** int(np.ceil(np.log2(weights.sum() + 2)))
    weights[rng.integers(vocab)] += total - weights.sum()
    row = torch.from_numpy(weights).to(dtype)
    expected = [token for token, weight in enumerate(weights) for _ in range(weight)]
    edges = np.arange(total) / total
    batch = row.expand(total, -1)
    assert draw(batch, torch.from_numpy(edges)).tolist() == expected
    below = np.nextafter(edges[1:], 0.0)  # the last number before each edge
    assert draw(batch[1:], torch.from_numpy(below)).tolist() == expected[:-1]
    assert draw_one(weights.tolist(), BELOW_ONE, dtype) == expected[-1]


weight = st.one_of(
    st.just(0.0), st.floats(0.0, 1.0), st.sampled_from([1e-30, 1e-12, 2.0**-40, 1.0, 1e6]), st.just(0.0)
)
uniform = st.one_of(st.floats(0.0, BELOW_ONE), st.sampled_from([0.0, 5e-324, 2.0**-53, 0.5, BELOW_ONE]))


@quick
@given(st.lists(weight, min_size=1, max_size=40), st.sampled_from([1, 7, 40]), uniform)
def test_draws_are_within_rounding_of_the_exact_inverse(weights: list[float], repeat: int, u: float) -> None:
    weights = [float(np.float32(w)) for w in weights] * repeat
    total = sum(map(Fraction, weights))
    assume(total > 0)
    for dtype in (torch.float32, torch.float64):
        token = draw_one(weights, u, dtype)
        assert 0 <= token < len(weights)
        assert weights[token] > 0.0, "a token without weight was drawn"
        below = sum(map(Fraction, weights[:token]))
        slack = total * Fraction(1, 10**12)
        assert below - slack <= Fraction(u) * total <= below + Fraction(weights[token]) + slack


@pytest.mark.parametrize("place", [0, 1, 255, 256, 257, 600, 999])
@pytest.mark.parametrize("u", [0.0, 5e-324, 0.3, BELOW_ONE])
def test_the_only_token_with_weight_is_drawn(place: int, u: float) -> None:
    for size in (1e-30, 1.0, 1e30):
        weights = [0.0] * 1000
        weights[place] = size
        assert draw_one(weights, u, torch.float32) == place


def test_draws_from_a_real_vocabulary_stay_on_tokens_with_weight() -> None:
    rng = np.random.default_rng(0)
    vocab = 49155
    weights = np.where(rng.random((4, vocab)) < 0.7, 0.0, rng.random((4, vocab)) ** 8).astype(np.float32)
    weights[0, -5000:] = 0.0
    weights[1, :5000] = 0.0
    cdf = weights.astype(np.longdouble).cumsum(-1)
    rows = rng.integers(0, 4, 800)
    u = np.concatenate([rng.random(790), [0.0, 0.0, 0.0, 5e-324, 2.0**-53], [BELOW_ONE] * 5])
    tokens = draw(torch.from_numpy(weights[rows]), torch.from_numpy(u)).numpy()
    assert (weights[rows, tokens] > 0).all()
    exact = np.array(
        [np.searchsorted(cdf[r], x * cdf[r, -1], side="right") for r, x in zip(rows, u, strict=True)]
    )
    assert (exact != tokens).mean() < 0.003  # u within rounding of an edge
    assert np.abs(cdf[rows, tokens] - cdf[rows, np.minimum(exact, vocab - 1)]).max() < 1e-9


def test_draws_just_below_the_end_of_a_block_stay_inside() -> None:
    """Where two ways of summing a block differ in the last bit, and nothing follows for a while."""
    rng = np.random.default_rng(6)
    weights = rng.random((500, 1024)) * 10.0 ** rng.integers(-9, 1, (500, 1024))
    weights[:, 256:700] = 0.0
    rows = torch.from_numpy(weights)
    for order in (rows, rows.flip(-1)):
        ends = order.view(500, 4, 256).sum(-1).cumsum(-1)
        edge = ends[:, 0] / ends[:, -1]
        for _ in range(4):
            tokens = draw(order, edge)
            assert (order.gather(1, tokens[:, None]) > 0.0).all()
            edge = torch.nextafter(edge, torch.zeros_like(edge))


def test_draws_do_not_depend_on_the_batch() -> None:
    generator = torch.Generator().manual_seed(2)
    for vocab in (10, 300, 49152):
        weights = torch.rand(9, vocab, generator=generator) ** 4
        u = torch.rand(9, generator=generator, dtype=torch.float64)
        together = draw(weights, u)
        assert [int(draw(weights[i : i + 1], u[i : i + 1])) for i in range(9)] == together.tolist()
        order = torch.randperm(9, generator=generator)
        assert torch.equal(draw(weights[order], u[order]), together[order])
