"""Verification on the device: the host's verdicts on any batch, and by enumeration the target's law."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import BatchItem, DraftBlock
from engine.cuda.filters import Filters, coupled_argmax, cut, softmax
from engine.cuda.verification import DeviceVerification
from engine.draws import coupled_argmax as host_coupled_argmax
from engine.native import loader
from engine.noise import row_keys
from engine.params import SamplingParams
from engine.sampling import SamplingState, probabilities
from engine.verification import verify
from tests.engine.cuda.fake_stream import FakeStream
from tests.engine.enumerate import Enumeration, World
from tests.engine.test_verification_exact import DRAFTERS, PROCESSORS, TOLERANCE, assert_same, stops

VOCAB = 24

params_of_requests = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 3, 30]),
    top_p=st.sampled_from([1.0, 1.0, 0.3, 0.9]),
    min_p=st.sampled_from([0.0, 0.0, 0.2]),
    seed=st.sampled_from([None, None, None, None, 7, -3]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.75]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.5]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.5]),
    logit_bias=st.sampled_from([{}, {}, {2: 3.0, 5: -100.0}]),
    min_tokens=st.sampled_from([0, 0, 3]),
    logprobs=st.sampled_from([None, None, 0, 3]),
    prompt_logprobs=st.just(2),
    allowed_token_ids=st.sampled_from([None, None, None, tuple(range(0, 24, 2))]),
    bad_words=st.sampled_from([(), (), ((3,), (4, 6))]),
)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[BatchItem], torch.Tensor]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    reduced = torch.from_numpy(rng.permutation(VOCAB)[:10]).long()
    items, rows = [], []
    for index in range(draw(st.integers(1, 5))):
        params = draw(params_of_requests)
        sample = draw(st.integers(0, 5)) > 0
        verify = draw(st.integers(0, 4)) if sample else 0
        known = int(rng.integers(1, 9))
        state = SamplingState(
            params,
            VOCAB,
            frozenset(rng.integers(0, VOCAB, 3).tolist()),
            rng.integers(0, VOCAB, known).tolist(),
            choice=int(rng.integers(0, 3)),
            stream=tuple(rng.integers(0, 2**32, 4).tolist()),
        )
        logits = rng.normal(size=(1 + verify, VOCAB)) * 2
        kind = draw(st.sampled_from(["one-hot", "whole", "reduced", "likely"]))
        block = None
        if verify:
            ids = reduced if kind == "reduced" else torch.arange(VOCAB)
            near = torch.softmax(torch.from_numpy(logits[:-1]), -1)[:, ids].numpy() + 1e-6
            near /= near.sum(-1, keepdims=True)  # so that drafts are accepted now and then
            q = torch.from_numpy(0.6 * near + 0.4 * rng.dirichlet([0.5] * len(ids), verify)).float()
            tokens = ids[torch.multinomial(q, 1)[:, 0]]
            if kind == "likely":  # accepted more often than not
                tokens = torch.from_numpy(logits[:-1].argmax(-1))
            lawful = kind in ("whole", "reduced")
            block = DraftBlock(
                tuple(tokens.tolist()), q if lawful else None, reduced if kind == "reduced" else None
            )
        if draw(st.integers(0, 9)) == 0:
            logits[rng.integers(0, 1 + verify)] = draw(st.sampled_from([np.nan, np.inf, -np.inf]))
        count = 1 + verify if draw(st.booleans()) or not sample else known + verify
        scored = draw(st.integers(0, count - sample)) if not verify else 0
        before = rng.normal(size=(scored, VOCAB))
        if scored and draw(st.integers(0, 9)) == 0:
            before[rng.integers(0, scored)] = np.nan
        rows += [before, logits] if sample else [before]
        items.append(
            BatchItem(
                sequence=index,
                history=rng.integers(0, VOCAB, known + 1, dtype=np.int32),
                start=known + verify - count if sample else 0,
                count=count,
                pages=np.zeros(4, dtype=np.int32),
                sample=sample,
                state=state,
                budget=draw(st.sampled_from([0, 1, 2, 3, 100] if not verify else [1, 2, 3, 100])),
                scored=scored,
                round=int(rng.integers(0, 50)),
                draft=block,
                verify=verify,
            )
        )
    table = np.concatenate(rows) if rows else np.zeros((0, VOCAB))
    return items, torch.from_numpy(table)


def copies(items: list[BatchItem]) -> list[BatchItem]:
    return [
        BatchItem(
            **{name: getattr(item, name) for name in BatchItem.__slots__ if name != "state"},
            state=item.state.fork(),
        )
        for item in items
    ]


@pytest.mark.parametrize(
    ("dtype", "kernels"), [(torch.float32, "native"), (torch.float32, "torch"), (torch.float64, "torch")]
)
@given(batch=batches())
@settings(deadline=None, max_examples=120)
def test_verdicts_are_the_hosts(batch, dtype, kernels):
    items, logits = batch
    ours, theirs = copies(items), copies(items)
    with mock.patch.object(
        loader, "native_library", loader.native_library if kernels == "native" else lambda: None
    ):
        wanted = verify(theirs, logits.to(dtype, copy=True))
        found = DeviceVerification(FakeStream())(ours, logits.to(dtype, copy=True))
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        assert (a.tokens, a.accepted, a.finish, a.stop_token) == (
            b.tokens,
            b.accepted,
            b.finish,
            b.stop_token,
        )
        assert a.scores == b.scores
        assert [each.token_id for each in a.logprobs] == [each.token_id for each in b.logprobs]
        for x, y in zip(a.logprobs, b.logprobs, strict=True):
            assert x.logprob == pytest.approx(y.logprob, abs=1e-5)
            assert [token for token, _ in x.top] == [token for token, _ in y.top]
            assert [value for _, value in x.top] == pytest.approx([value for _, value in y.top], abs=1e-5)
    for a, b in zip(ours, theirs, strict=True):
        assert a.state.generated == b.state.generated
        assert torch.equal(a.state._counts, b.state._counts)


def test_laws_of_several_vocabularies_and_places_meet_in_one_batch():
    """Blocks that a model made in different rounds, and blocks that were looked up."""
    rng = np.random.default_rng(0)
    first, second = (torch.from_numpy(rng.permutation(VOCAB)[:size]).long() for size in (8, 12))
    counts = np.zeros(VOCAB)
    expected = np.zeros(VOCAB)
    logits = torch.from_numpy(rng.normal(size=(4 * 2, VOCAB)))
    for trial in range(40):
        items = []
        for index, ids in enumerate((first, None, second, first)):
            q = torch.from_numpy(rng.dirichlet([1.0] * (VOCAB if ids is None else len(ids)), 1)).float()
            place = int(torch.multinomial(q, 1))
            token = place if ids is None else int(ids[place])
            state = SamplingState(SamplingParams(), VOCAB, frozenset(), stream=(index, trial, 1, 2))
            items.append(
                BatchItem(
                    index,
                    np.zeros(1, dtype=np.int32),
                    0,
                    2,
                    np.zeros(1, dtype=np.int32),
                    True,
                    state,
                    100,
                    trial,
                    DraftBlock((token,), q, ids),
                    1,
                )
            )
        wanted = verify(copies(items), logits.clone())
        assert DeviceVerification(FakeStream())(items, logits.clone()) == wanted
        counts[wanted[0].tokens[0]] += 1
    expected[:] = counts
    assert counts.sum() == 40


# ---- by enumeration, through the checker that the host's verification must pass


def assert_lossless(world: World, dtype: torch.dtype = torch.float64) -> None:
    target = world.target_law()
    drafts = list(world.drafts())
    lengths = range(world.gamma + 1)
    cases = [(block, length) for length in lengths for block, _ in drafts]
    laws = Enumeration(world, dtype=dtype, verify=DeviceVerification(FakeStream())).emitted(cases)
    for length in lengths:
        part = laws[length * len(drafts) : (length + 1) * len(drafts)]
        assert_same(world.mixture(part, [weight for _, weight in drafts]), target)


@pytest.mark.parametrize("name", PROCESSORS)
def test_every_processor_is_lossless(name):
    params = PROCESSORS[name]
    assert_lossless(World(params, seed=1, drafter="processed", stop_ids=stops(params)))


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("gamma", [1, 3])
def test_every_kind_of_draft_is_lossless(drafter, gamma):
    assert_lossless(World(PROCESSORS["all"], vocab=3, gamma=gamma, seed=11, drafter=drafter))


@pytest.mark.parametrize("name", ["none", "filters"])
def test_single_precision_is_lossless(name):
    assert_lossless(World(PROCESSORS[name], seed=8), torch.float32)


def test_deterministic_drafts_are_lossless():
    for params in (PROCESSORS["none"], PROCESSORS["filters"]):
        world = World(params, seed=5)
        target = world.target_law()
        cases = list(itertools.product(world.blocks(), (1, 2)))
        for law in Enumeration(world, verify=DeviceVerification(FakeStream())).emitted(cases):
            assert_same(world.mixture([law], [1.0]), target)


@pytest.mark.parametrize("broken", ["ratio", "residual"])
def test_the_checker_notices_a_wrong_variant(broken):
    """Else it would say nothing about the right one."""
    from engine.cuda import laws as module

    world = World(SamplingParams(top_k=2), seed=1, gamma=1)
    with mock.patch.object(
        module.LawGroup,
        "chances" if broken == "ratio" else "whole",
        (lambda self, laws, tokens, vocab: torch.ones(len(laws)))
        if broken == "ratio"
        else (lambda self, laws, vocab: torch.zeros_like(laws)),
    ):
        law = Enumeration(world, grid=8, verify=DeviceVerification(FakeStream())).law(lambda _: 1)
    target = world.target_law()
    assert 0.5 * sum(abs(law.get(t, 0.0) - target.get(t, 0.0)) for t in {*law, *target}) > 0.02
    right = Enumeration(world, grid=8, verify=DeviceVerification(FakeStream())).law(lambda _: 1)
    assert 0.5 * sum(abs(right.get(t, 0.0) - target.get(t, 0.0)) for t in {*right, *target}) <= TOLERANCE


# ---- the pieces


@given(
    st.integers(0, 2**32),
    st.lists(
        st.tuples(
            st.sampled_from([0, 1, 2, 5, 70, 500]),
            st.sampled_from([1.0, 0.1, 0.5, 0.95]),
            st.sampled_from([0.0, 0.01, 0.5, 1.0]),
        ),
        min_size=1,
        max_size=6,
    ),
    st.booleans(),
)
@settings(deadline=None, max_examples=150)
def test_filters_keep_what_the_hosts_keep(seed, filters, ties):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(len(filters), 300)) * 3)
    if ties:
        logits = (logits * 2).round() / 2
    params = [SamplingParams(temperature=1.3, top_k=k, top_p=p, min_p=m) for k, p, m in filters]
    arrays = [torch.from_numpy(array) for array in Filters.arrays(params)]
    ks = [each.top_k for each in params]
    found = cut(softmax(logits, arrays[0]), Filters(*arrays, max(ks) if min(ks) else None))
    wanted = probabilities(logits, params)
    plain = torch.tensor([not (k or p < 1.0 or m) for k, p, m in filters])
    assert torch.allclose(found, wanted, atol=1e-12)
    assert torch.equal(found[~plain] > 0, wanted[~plain] > 0)


def test_many_rows_are_filtered_in_pieces():
    params = [SamplingParams(temperature=0.7, top_k=1 + i % 9, top_p=0.9) for i in range(300)]
    logits = torch.randn(300, 50, dtype=torch.float64)
    arrays = [torch.from_numpy(array) for array in Filters.arrays(params)]
    found = cut(softmax(logits, arrays[0]), Filters(*arrays, 9))
    assert torch.allclose(found, probabilities(logits, params), atol=1e-12)


def test_coupled_noise_picks_the_same_tokens():
    p = torch.softmax(torch.randn(300, 60) * 4, -1)
    keys = row_keys(torch.arange(300), torch.zeros(300, dtype=torch.int64), torch.arange(300) * 3)
    assert torch.equal(coupled_argmax(p, keys), host_coupled_argmax(p, keys))
