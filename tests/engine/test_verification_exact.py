"""Verification emits the target's law: by exact enumeration, and wrong variants do not pass."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from engine import decision, verification
from engine.batch import BatchItem, DraftBlock, Verdict
from engine.native import loader
from engine.noise import Purpose, uniforms
from engine.params import SamplingParams
from engine.sampling import SamplingState
from engine.verification import verify
from tests.engine.enumerate import (
    Enumeration,
    Law,
    Read,
    Text,
    World,
    bare_law,
    marginal,
    total_variation,
)
from tests.engine.harness import one_thread  # noqa: F401
from tests.engine.plain_law import plain_law

TOLERANCE = 1e-12
DRAFTERS = ("random", "processed", "unprocessed", "reduced")

#: Penalties and biases are binary fractions, because the engine keeps them in float32.
PROCESSORS = {
    "none": SamplingParams(),
    "cold": SamplingParams(temperature=0.5),
    "hot": SamplingParams(temperature=1.75),
    "top-k": SamplingParams(top_k=2),
    "top-1": SamplingParams(top_k=1),
    "top-p": SamplingParams(top_p=0.7),
    "min-p": SamplingParams(min_p=0.3),
    "filters": SamplingParams(temperature=1.5, top_k=3, top_p=0.9, min_p=0.05),
    "presence": SamplingParams(presence_penalty=0.75),
    "presence-reward": SamplingParams(presence_penalty=-1.5),
    "frequency": SamplingParams(frequency_penalty=0.625),
    "repetition": SamplingParams(repetition_penalty=2.0),
    "repetition-reward": SamplingParams(repetition_penalty=0.5),
    "bias": SamplingParams(logit_bias={1: 2.0, 3: -100.0}),
    "min-tokens": SamplingParams(min_tokens=3),  # one is out already: binds rows 0 and 1, not row 2
    "allowed": SamplingParams(allowed_token_ids=(0, 1, 3)),
    "bad-words": SamplingParams(bad_words=((3,), (1, 2), (2, 2, 0))),
    "all": SamplingParams(
        temperature=0.75,
        top_p=0.95,
        top_k=3,
        min_p=0.02,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        repetition_penalty=1.25,
        logit_bias={0: 0.5},
        min_tokens=2,
    ),
    "greedy": SamplingParams(temperature=0.0, presence_penalty=0.5),
}
each_processor = pytest.mark.parametrize("params", PROCESSORS.values(), ids=PROCESSORS.keys())

each_method = pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(seed=1), SamplingParams(temperature=0.0)],
    ids=["rejection", "coupled", "greedy"],
)


def stops(params: SamplingParams) -> frozenset[int]:
    return frozenset({3}) if params.min_tokens else frozenset()


def assert_same(law: Law, target: Law) -> None:
    assert sum(law.values()) == pytest.approx(1.0, abs=1e-12)
    assert total_variation(law, target) <= TOLERANCE
    for position in range(max(map(len, target))):
        assert total_variation(marginal(law, position), marginal(target, position)) <= TOLERANCE


def assert_lossless(world: World, dtype: torch.dtype = torch.float64) -> None:
    """With blocks drawn from q, for every verify length."""
    target = world.target_law()
    assert sum(target.values()) == pytest.approx(1.0, abs=1e-12)
    drafts = list(world.drafts())
    assert sum(weight for _, weight in drafts) == 1.0
    lengths = range(world.gamma + 1)
    cases = [(block, length) for length in lengths for block, _ in drafts]
    laws = Enumeration(world, dtype=dtype).emitted(cases)
    for length in lengths:
        part = laws[length * len(drafts) : (length + 1) * len(drafts)]
        assert_same(world.mixture(part, [weight for _, weight in drafts]), target)


# ---- lossless


@each_processor
@pytest.mark.parametrize("drafter", ["random", "processed"])
def test_sampled_drafts_are_lossless(params: SamplingParams, drafter: str) -> None:
    assert_lossless(World(params, seed=1, drafter=drafter, stop_ids=stops(params)))


@each_processor
def test_every_deterministic_draft_is_lossless(params: SamplingParams) -> None:
    """Each block by itself, also those that the target would never say."""
    world = World(params, seed=5, stop_ids=stops(params))
    target = world.target_law()
    cases = list(itertools.product(world.blocks(), (1, 2)))
    assert len(cases) == 16 * 2
    for law in Enumeration(world).emitted(cases):
        assert_same(world.mixture([law], [1.0]), target)


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("name", ["none", "all"])
def test_every_block_length_is_lossless(gamma: int, drafter: str, name: str) -> None:
    assert_lossless(World(PROCESSORS[name], vocab=3, gamma=gamma, seed=11, drafter=drafter))


@pytest.mark.parametrize("name", ["none", "top-k", "top-p", "min-p", "filters", "all"])
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_single_precision_is_lossless(name: str, kernels: str) -> None:
    """What models really return; the kernels' filters and torch's."""
    if kernels == "native" and loader.native_library() is None:
        pytest.skip("the kernels were not built")
    with mock.patch.object(
        loader, "native_library", loader.native_library if kernels == "native" else lambda: None
    ):
        for drafter in ("random", "processed"):
            assert_lossless(World(PROCESSORS[name], seed=8, drafter=drafter), torch.float32)


@pytest.mark.slow
@each_processor
def test_many_worlds_are_lossless(params: SamplingParams) -> None:
    for seed, drafter in itertools.product(range(20, 23), DRAFTERS):
        assert_lossless(World(params, seed=seed, drafter=drafter, stop_ids=stops(params)))


@pytest.mark.parametrize("params", [p for n, p in PROCESSORS.items() if n != "none"], ids=lambda p: "")
def test_every_processor_changes_the_law(params: SamplingParams) -> None:
    """Else the tests above would not notice that it was left out."""
    worlds = [World(params, seed=seed, stop_ids=stops(params)) for seed in range(2)]
    bare = [World(SamplingParams(), seed=world.seed, stop_ids=world.stop_ids) for world in worlds]
    moved = max(total_variation(a.target_law(), b.target_law()) for a, b in zip(worlds, bare, strict=True))
    assert moved > 0.02


@pytest.mark.parametrize("drafter", ["random", "processed", "reduced"])
@pytest.mark.parametrize("stop_ids", [{0}, {1, 2}, {0, 1, 2, 3}])
def test_stop_tokens_inside_the_block_are_lossless(drafter: str, stop_ids: set[int]) -> None:
    for params in (SamplingParams(), SamplingParams(min_tokens=3), PROCESSORS["filters"]):
        if params.min_tokens and len(stop_ids) == 4:
            continue
        assert_lossless(World(params, seed=3, drafter=drafter, stop_ids=frozenset(stop_ids)))


@pytest.mark.parametrize("budget", [1, 2, 3, 4])
@pytest.mark.parametrize("stop_ids", [frozenset(), frozenset({2})])
def test_budgets_cut_anywhere_without_bias(budget: int, stop_ids: frozenset[int]) -> None:
    params = PROCESSORS["frequency"]
    assert_lossless(World(params, vocab=3, gamma=3, seed=9, stop_ids=stop_ids, budget=budget))


def test_drafts_that_equal_the_target_are_always_accepted() -> None:
    """p = q in every row: the residual has no mass, and no uniform may reject."""
    world = World(SamplingParams(), seed=0)
    p = {prefix: [0.5, 0.25, 0.0, 0.25] for n in range(3) for prefix in itertools.product(range(4), repeat=n)}
    world._p, world._q = p, p
    world.logits = lambda prefix: np.log([0.5, 0.25, 1e-300, 0.25]).tolist()  # type: ignore[method-assign]
    cases = [(block, 2) for block, _ in world.drafts()]
    for (block, _), law in zip(cases, Enumeration(world).emitted(cases), strict=True):
        assert {text[:2] for text in law} == {block.tokens}
    assert_lossless(world)


@pytest.mark.parametrize("law", [SamplingParams(), SamplingParams(top_k=2)])
def test_no_other_uniform_is_read(law: SamplingParams) -> None:
    """What stands in the slots that a run does not need makes no difference at all."""
    world = World(law, seed=4, gamma=2)
    laws = [Enumeration(world, filler=filler).law(lambda _: 2) for filler in (0.0, 0.5, 1.0 - 2.0**-53)]
    assert laws[0] == laws[1] == laws[2]


def test_lengths_may_depend_on_the_drafts_before_them() -> None:
    for name in ("none", "all"):
        world = World(PROCESSORS[name], seed=6)
        law = Enumeration(world).law(lambda x: 2 if x[0] in (0, 2) else 1)
        assert_same(law, world.target_law())


# ---- wrong variants must not pass the same checker


def measured(
    world: World, alias: Callable[[Read], Read] = lambda read: read, together: int = 4096, grid: int = 8
) -> float:
    """Total variation to the target, near enough for a wrong variant; a right one gives 0 on every grid."""
    law = Enumeration(world, grid=grid, alias=alias, together=together).law(lambda _: world.gamma)
    return total_variation(law, world.target_law())


class ArgmaxDrafts(World):
    """Draws the argmax and reports the softmax."""

    def drawn(self, prefix: Text) -> list[float]:
        q = self.q(prefix)
        return [float(token == q.index(max(q))) for token in range(len(q))]


class FilteredDrafts(World):
    """Draws from the two likeliest only and reports the whole distribution."""

    def drawn(self, prefix: Text) -> list[float]:
        return plain_law(np.log(np.add(self.q(prefix), 1e-9)).tolist(), SamplingParams(top_k=2))


class NotRenormalised(FilteredDrafts):
    """Draws from the two likeliest and reports them with the weights that they had before the filter."""

    def q(self, prefix: Text) -> list[float]:
        q = super().q(prefix)
        last = sorted(range(len(q)), key=lambda token: (-q[token], token))[2:]
        return [0.0 if token in last else weight for token, weight in enumerate(q)]


class WrongTemperature(World):
    """Draws at half the temperature that it reports."""

    def drawn(self, prefix: Text) -> list[float]:
        return plain_law(np.log(np.add(self.q(prefix), 1e-9)).tolist(), SamplingParams(temperature=0.5))


@pytest.mark.parametrize(
    ("drafter", "bound"),
    [(ArgmaxDrafts, 0.3), (FilteredDrafts, 0.05), (NotRenormalised, 0.1), (WrongTemperature, 0.05)],
)
def test_a_draft_law_that_is_not_the_one_drawn_from_fails(drafter: type[World], bound: float) -> None:
    assert max(measured(drafter(SamplingParams(), seed=seed, gamma=1)) for seed in (5, 7)) > bound


@dataclass
class Mutant:
    """Stands around the pieces of `engine.verification`, one item a call, and may swap what they compute."""

    ratio: str = "processed"
    residual: str = "processed"

    @contextmanager
    def __call__(self) -> Iterator[None]:
        memory: dict[str, Any] = {}
        probabilities, draw = decision.probabilities, decision.draw

        def laws(logits: torch.Tensor, params: list[SamplingParams], rows: list[int]) -> torch.Tensor:
            assert len(params) == 1
            bare = [replace(params[0], top_k=0, top_p=1.0, min_p=0.0)]
            memory["processed"], memory["bare"] = (
                probabilities(logits, params, rows),
                probabilities(logits, bare, rows),
            )
            return memory[self.ratio].clone()

        def final(weights: torch.Tensor, u: torch.Tensor, rows: Any, rejected: Any) -> torch.Tensor:
            p = memory["processed"]
            if rejected[0] is None or self.residual == "p itself":
                return draw(p, u)
            residual = (memory[self.residual] - rejected[0].law).clamp_min(0.0)
            return draw(residual if residual.sum() > 0 else p, u)

        with mock.patch.multiple(decision, probabilities=laws, draw=final):
            yield


@pytest.mark.parametrize(
    ("mutant", "bound"),
    [
        (Mutant(ratio="bare"), 0.05),
        (Mutant(residual="bare"), 0.1),
        (Mutant(ratio="bare", residual="bare"), 0.1),
        (Mutant(residual="p itself"), 0.1),
    ],
    ids=str,
)
def test_ratio_and_residual_from_another_law_fail(mutant: Mutant, bound: float) -> None:
    with mutant():
        found = measured(World(SamplingParams(top_k=2), seed=1, gamma=1), together=1, grid=6)
    assert found > bound


def test_the_mutants_frame_alone_changes_nothing() -> None:
    with Mutant()():
        assert measured(World(SamplingParams(top_k=2), seed=1, gamma=1), together=1, grid=6) <= TOLERANCE


def test_accepting_at_equality_fails() -> None:
    """`u q <= p` lets u = 0 accept a token that the target forbids: one ulp more of p says the same."""

    def one_more(logits: torch.Tensor, params: list[SamplingParams], rows: list[int]) -> torch.Tensor:
        p = real(logits, params, rows)
        return torch.nextafter(p, torch.full_like(p, torch.inf))

    real = decision.probabilities
    world = World(SamplingParams(top_k=1), seed=1, gamma=1)
    assert measured(world, grid=1) <= TOLERANCE
    with mock.patch.object(decision, "probabilities", one_more):
        law = Enumeration(world).law(lambda _: 1)
    assert set(law) > set(world.target_law()), "forbidden texts were emitted"
    assert total_variation(law, world.target_law()) > 10 * TOLERANCE


def test_one_uniform_for_acceptance_and_draw_fails() -> None:
    def shared(read: Read) -> Read:
        return (Purpose.ACCEPT, read[1])

    assert measured(World(SamplingParams(), seed=6, gamma=1), alias=shared, grid=32) > 0.05


def test_one_uniform_for_all_slots_fails() -> None:
    def shared(read: Read) -> Read:
        return (read[0], 0)

    assert measured(World(SamplingParams(), seed=7, gamma=2), alias=shared) > 0.05


def test_a_length_that_looks_at_its_own_draft_fails() -> None:
    found = []
    for seed in range(6):
        world = World(SamplingParams(), seed=seed, gamma=1)
        law = Enumeration(world).law(lambda x: int(x[0] < 2))
        found.append(total_variation(law, world.target_law()))
    assert max(found) > 0.1


@pytest.mark.parametrize("name", ["presence", "frequency", "repetition", "min-tokens", "bad-words"])
def test_state_that_does_not_follow_the_block_fails(name: str) -> None:
    params = PROCESSORS[name]
    world = World(params, seed=2, drafter="processed", stop_ids=stops(params))
    assert world.state.generated == 1
    assert measured(world, grid=2) <= TOLERANCE
    with mock.patch.object(SamplingState, "advance"):
        assert measured(world, grid=2) > 0.01


# ---- thresholds, exactly


def single(
    p: list[float],
    u: float,
    final: float = 0.5,
    draft: DraftBlock | None = None,
    params: SamplingParams | None = None,
    **changes: Any,
) -> Verdict:
    """One item whose every row has law p, and which meets u at every acceptance."""
    verify_length = len(draft) if draft else 0
    state = SamplingState(params or SamplingParams(), len(p), changes.pop("stop_ids", frozenset()))
    item = BatchItem(
        sequence=0,
        history=np.array([0], dtype=np.int32),
        start=0,
        count=1 + verify_length,
        pages=np.zeros(1, dtype=np.int32),
        sample=True,
        state=state,
        budget=changes.pop("budget", 100),
        round=0,
        draft=draft,
        verify=verify_length,
    )

    def given(streams: Any, positions: Any, rounds: Any, slots: int, purpose: Purpose) -> list[list[float]]:
        return [[u if purpose is Purpose.ACCEPT else final] * slots]

    logits = torch.tensor([p] * (1 + verify_length), dtype=torch.float64).log()
    with mock.patch.object(verification, "host_uniforms", given):
        (verdict,) = verify([item], logits)
    return verdict


BELOW_ONE = 1.0 - 2.0**-53


@pytest.mark.parametrize(
    ("p_x", "q_x", "u", "accepted"),
    [
        (0.0, 0.5, 0.0, 0),  # the target forbids it
        (0.0, 0.0, 0.0, 0),
        (0.5, 0.0, BELOW_ONE, 1),  # a drafter that says it cannot happen
        (0.5, 0.5, BELOW_ONE, 1),  # p = q
        (0.5, 0.25, BELOW_ONE, 1),
        (0.25, 0.5, 0.5, 0),  # u q = p
        (0.25, 0.5, np.nextafter(0.5, 0.0), 1),
        (0.25, 0.5, 0.0, 1),
        (0.25, 1.0, 0.25, 0),
        (0.25, 1.0, np.nextafter(0.25, 0.0), 1),
    ],
)
def test_acceptance_is_strict(p_x: float, q_x: float, u: float, accepted: int) -> None:
    def exact(logits: torch.Tensor, params: list[SamplingParams], rows: list[int]) -> torch.Tensor:
        return torch.tensor([[p_x, 1.0 - p_x]], dtype=torch.float64).expand(len(params), 2).clone()

    block = DraftBlock((0,), torch.tensor([[q_x, 1.0 - q_x]]))
    with mock.patch.object(decision, "probabilities", exact):
        assert single([0.5, 0.5], u, draft=block).accepted == accepted


def test_a_rejection_with_p_equal_to_q_falls_back_to_p() -> None:
    """Rounding can reject where p = q; then the residual is empty."""

    def exact(logits: torch.Tensor, params: list[SamplingParams], rows: list[int]) -> torch.Tensor:
        return torch.tensor([[0.5, 0.25, 0.25]])

    block = DraftBlock((0,), torch.tensor([[0.75, 0.25, 0.25]]))
    with mock.patch.object(decision, "probabilities", exact):
        for final, token in ((0.0, 0), (0.6, 1), (0.8, 2)):
            verdict = single([1.0, 1.0, 1.0], BELOW_ONE, final, draft=block)
            assert (verdict.tokens, verdict.accepted) == ((token,), 0)


@pytest.mark.parametrize("p_x", [0.5, 0.998, 0.9995, 1.0 - 2.0**-20])
def test_a_rejected_certainty_leaves_the_rest_of_p(p_x: float) -> None:
    """One-hot q, whatever is left."""
    rest = (1.0 - p_x) / 4
    for final, token in ((0.0, 0), (0.24, 0), (0.26, 2), (BELOW_ONE, 2)):
        verdict = single([rest, p_x, 3 * rest], BELOW_ONE, final, draft=DraftBlock((1,)))
        assert (verdict.tokens, verdict.accepted) == ((token,), 0)
    assert single([0.0, 1.0, 0.0], BELOW_ONE, draft=DraftBlock((1,))).accepted == 1


def test_a_truncated_or_accepted_block_ends_with_a_draw_from_p() -> None:
    p = [0.125, 0.375, 0.5]
    for length in range(4):
        block = DraftBlock((2,) * length)
        for final, token in ((0.0, 0), (0.124, 0), (0.126, 1), (0.499, 1), (0.501, 2), (BELOW_ONE, 2)):
            verdict = single(p, 0.0, final, draft=block or None)
            assert (verdict.tokens, verdict.accepted) == ((2,) * length + (token,), length)


# ---- ends


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(seed=1)]
)
@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 6, 100])
@pytest.mark.parametrize("stop_at", [0, 1, 2, 3, 4, None])
def test_ends_inside_an_accepted_block(params: SamplingParams, budget: int, stop_at: int | None) -> None:
    """The target is certain and says what was drafted, then 0; a stop beats the budget at the same token."""
    text = [1, 2, 1, 2, 0]
    stop_ids: frozenset[int] = frozenset()
    if stop_at is not None:
        text[stop_at] = 3
        stop_ids = frozenset({3})
    logits = torch.full((5, 4), -torch.inf)
    logits[torch.arange(5), text] = 0.0
    for length in range(5):
        item = BatchItem(
            sequence=0,
            history=np.array([0], dtype=np.int32),
            start=0,
            count=1 + length,
            pages=np.zeros(1, dtype=np.int32),
            sample=True,
            state=SamplingState(replace(params, logprobs=1), 4, stop_ids),
            budget=budget,
            round=0,
            draft=DraftBlock(tuple(text[:4])),
            verify=length,
        )
        (verdict,) = verify([item], logits[: 1 + length].clone())
        stop_end = 100 if stop_at is None else stop_at + 1
        end = min(length + 1, budget, stop_end)
        assert verdict.tokens == tuple(text[:end])
        assert verdict.accepted == min(end, length)
        finish = "stop" if end == stop_end else "length" if end == budget else None
        assert verdict.finish == finish
        assert verdict.stop_token == (3 if finish == "stop" else None)
        assert item.state.generated == end
        assert [report.token_id for report in verdict.logprobs] == text[:end]
        assert all(report.top == ((report.token_id, 0.0),) for report in verdict.logprobs)


def test_logprobs_are_the_models_own_whatever_was_accepted() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [2.0, 0.5, 1.0]], dtype=torch.float64)
    item = BatchItem(
        sequence=0,
        history=np.array([0], dtype=np.int32),
        start=0,
        count=2,
        pages=np.zeros(1, dtype=np.int32),
        sample=True,
        state=SamplingState(
            SamplingParams(temperature=0.0, logprobs=2, logit_bias={1: 100.0}), 3, frozenset()
        ),
        budget=10,
        round=0,
        draft=DraftBlock((1,)),
        verify=1,
    )
    (verdict,) = verify([item], logits.clone())
    assert verdict.tokens == (1, 1)
    for report, row, best in zip(
        verdict.logprobs, torch.log_softmax(logits, -1), ([2, 1], [0, 2]), strict=True
    ):
        assert report.logprob == pytest.approx(float(row[1]), abs=1e-12)
        assert [token for token, _ in report.top] == best
        assert [value for _, value in report.top] == pytest.approx(row[best].tolist(), abs=1e-12)


# ---- batches and keys


def random_item(rng: np.random.Generator, key: int, vocab: int) -> tuple[BatchItem, torch.Tensor]:
    """One sequence's share of a step: any kind of request, any length, any draft."""
    params = [
        SamplingParams(),
        SamplingParams(top_k=5, temperature=0.75),
        SamplingParams(top_p=0.8, presence_penalty=0.5),
        SamplingParams(min_p=0.1, repetition_penalty=1.5, logit_bias={3: 2.0}),
        SamplingParams(seed=int(rng.integers(2**62)), top_p=0.9),
        SamplingParams(temperature=0.0, frequency_penalty=0.5),
    ][int(rng.integers(6))]
    generator = torch.Generator().manual_seed(int(rng.integers(2**31)))
    known = int(rng.integers(1, 4))
    history = rng.integers(0, vocab, int(rng.integers(known, 20))).astype(np.int32)
    state = SamplingState(
        params, vocab, frozenset({1}), history.tolist(), 2, tuple(rng.integers(0, 2**32, 4).tolist())
    )
    drafted = int(rng.integers(0, 6))
    length = int(rng.integers(0, drafted + 1))
    logits = torch.from_numpy(rng.normal(size=(1 + length, vocab)) * 2)
    q = torch.softmax(torch.from_numpy(rng.normal(size=(drafted, vocab))), -1).float()
    q[: 1 + length] = (
        q[: 1 + length] + 4 * torch.softmax(logits, -1)[: len(q)]
    ) / 5  # near p, to be accepted
    q /= q.sum(-1, keepdim=True)
    tokens = tuple(torch.multinomial(row, 1, generator=generator).item() for row in q)
    block = DraftBlock(tokens, q if rng.random() < 0.7 else None) if drafted else None
    return (
        BatchItem(
            sequence=key,
            history=history,
            start=len(history) - known,
            count=known + length,
            pages=np.zeros(1, dtype=np.int32),
            sample=True,
            state=state,
            budget=int(rng.integers(1, 9)),
            round=int(rng.integers(0, 50)),
            draft=block,
            verify=length,
        ),
        logits,
    )


def twin(item: BatchItem) -> BatchItem:
    return replace(item, state=item.state.fork())


def by_the_book(item: BatchItem, logits: torch.Tensor) -> tuple[list[int], int]:
    """Rejection sampling of one item, written down plainly. Returns what is emitted and accepted."""

    def u(slot: int, purpose: Purpose) -> float:
        key = [torch.tensor([value]) for value in (item.state.stream, len(item.history) - 1, item.round)]
        return float(uniforms(*key, slot + 1, purpose)[0, slot])

    def draw(weights: list[float], at: float) -> int:
        at *= sum(weights)
        for token, weight in enumerate(weights):
            at -= weight
            if at < 0:
                return token
        raise AssertionError("off the end")

    state, emitted = item.state, []
    for row in range(item.verify + 1):
        prompt = item.history.tolist()
        p = plain_law(logits[row].tolist(), state.params, prompt, emitted, state.stop_ids)
        if row < item.verify and item.draft is not None:
            x = item.draft.tokens[row]
            q = [float(x == t) for t in range(len(p))] if item.draft.q is None else item.draft.q[row].tolist()
            if u(row, Purpose.ACCEPT) * q[x] < p[x]:
                emitted.append(x)
                if x in state.stop_ids or len(emitted) == item.budget:
                    return emitted, row + 1
                continue
            p = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
        emitted.append(draw(p, u(row, Purpose.FINAL)))
        return emitted, row
    raise AssertionError("unreachable")


def test_a_sampled_item_follows_the_book_with_the_uniforms_of_its_own_key() -> None:
    rng = np.random.default_rng(0)
    items = [random_item(rng, key, 24) for key in range(300)]
    free = [(i, z) for i, z in items if i.state.params.seed is None and not i.state.params.greedy]
    verdicts = verify([twin(item) for item, _ in free], torch.cat([logits for _, logits in free]))
    for (item, logits), verdict in zip(free, verdicts, strict=True):
        assert (list(verdict.tokens), verdict.accepted) == by_the_book(item, logits)
    accepted = [verdict.accepted for verdict in verdicts]
    assert max(accepted) >= 3
    assert min(accepted) == 0


def test_a_verdict_does_not_depend_on_the_batch() -> None:
    rng = np.random.default_rng(1)
    items = [random_item(rng, key, 24) for key in range(200)]
    alone = [verify([twin(item)], logits.clone())[0] for item, logits in items]
    for _ in range(3):
        order = rng.permutation(len(items))
        together = verify([twin(items[i][0]) for i in order], torch.cat([items[i][1] for i in order]))
        assert together == [alone[i] for i in order]


def test_items_without_sample_have_no_rows_and_no_tokens() -> None:
    rng = np.random.default_rng(2)
    items = [random_item(rng, key, 24) for key in range(20)]
    alone = [verify([twin(item)], logits.clone())[0] for item, logits in items]
    mixed: list[BatchItem] = []
    for item, _ in items:
        mixed += [replace(twin(item), sample=False, verify=0, draft=None), twin(item)]
    verdicts = verify(mixed, torch.cat([logits for _, logits in items]))
    assert verdicts[::2] == [Verdict()] * 20
    assert verdicts[1::2] == alone


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_fail_their_own_item_only(bad: float) -> None:
    rng = np.random.default_rng(3)
    items = [random_item(rng, key, 24) for key in range(20)]
    alone = [verify([twin(item)], logits.clone())[0] for item, logits in items]
    broken = [logits.clone() for _, logits in items]
    for index in range(0, 20, 3):
        broken[index][:, 7] = bad
    verdicts = verify([twin(item) for item, _ in items], torch.cat(broken))
    for index, (verdict, expected) in enumerate(zip(verdicts, alone, strict=True)):
        assert verdict == (expected if index % 3 else Verdict(finish="error"))


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(seed=1), SamplingParams(temperature=0.0)]
)
def test_a_row_that_the_processors_empty_fails_its_own_item_only(params: SamplingParams) -> None:
    """Here by min_tokens with every token a stop token; nothing is left that might be emitted."""
    rng = np.random.default_rng(4)
    healthy, logits = random_item(rng, 0, 24)
    expected = verify([twin(healthy)], logits.clone())[0]
    state = SamplingState(replace(params, min_tokens=1), 24, frozenset(range(24)))
    empty = replace(twin(healthy), state=state, verify=0, draft=None, count=1)
    verdicts = verify([twin(healthy), empty], torch.cat([logits, logits[:1]]))
    assert verdicts[0] == expected
    assert verdicts[1] == Verdict(finish="forbidden")


def test_bare_law_is_the_law_without_filters() -> None:
    world = World(SamplingParams(top_k=2, presence_penalty=0.5), seed=2)
    assert sum(weight > 0 for weight in bare_law(world, ())) > 2
    assert sum(weight > 0 for weight in world.p(())) == 2
