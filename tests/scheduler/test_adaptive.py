"""Policies by enumeration: those we serve keep every law to rounding, their illegal cousins do not."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler import few
from scheduler.adaptive import Algorithm1, Lagged, LookAhead, Threshold
from scheduler.lookahead import best_count, look_ahead
from scheduler.policy import Choice, Drafted, FewChoice, Fixed
from scheduler.ranking import gains, rank, survivals, table
from tests.scheduler.joint import GAMMA, Toy, error


class Few(LookAhead):
    """As it decides on few candidates."""

    def select(self, choice: Choice) -> list[int]:
        return self.select_few(in_few(choice))


def in_few(choice: Choice) -> FewChoice:
    alive = few.survivals(choice.chances.tolist())
    rows = (choice.chances.tolist(), alive, choice.lagged.tolist(), choice.guarded.tolist())
    numbers = (choice.sequences, choice.row_cap, choice.seconds.tolist(), choice.load)
    return FewChoice(choice.length.tolist(), *rows, *numbers)


LEGAL = [
    LookAhead(), Few(), Algorithm1(), Lagged(), Fixed(1), Fixed(2),
    Threshold(), Threshold(base=0.2, sensitivity=0.9), Threshold(least=1, most=1),
]  # fmt: skip
#: steps a second at R, R + 1, ...: curves and staircases on which policies were caught looking
STEPS_A_SECOND = [
    (1.0, 0.5, 0.45, 0.4, 0.3, 0.3, 0.3),
    (1.0, 0.5, 0.35, 0.27, 0.265, 0.26, 0.26),
    (1.0, 1.0, 0.7, 0.7, 0.7, 0.3, 0.3),
    (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4),
    (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
]
CASES = [(seed, vocab, count) for seed in range(6) for vocab, count in ((2, 2), (3, 1))]


def toys(seed: int, vocab: int, count: int) -> list[Toy]:
    rng = np.random.default_rng(seed)
    return [Toy(vocab, rng) for _ in range(count)]


def choice(chances, lagged, rates, guarded=None, cap=None) -> Choice:
    guarded = guarded or [True] * len(chances)
    blocks = [Drafted(GAMMA, *each) for each in zip(chances, lagged, guarded, strict=True)]
    cap = GAMMA * len(blocks) if cap is None else cap
    return Choice.of(blocks, len(blocks), cap, 1.0 / np.array(rates[: cap + 1]), load=0.3)


def histories(seed: int, count: int) -> list[tuple[float, ...]]:
    rng = np.random.default_rng((seed, 7))
    return [tuple(np.cumprod(rng.random(GAMMA) ** 0.5).tolist()) for _ in range(count)]


@pytest.mark.parametrize("rates", STEPS_A_SECOND)
@pytest.mark.parametrize("policy", LEGAL, ids=[f"{n}-{policy.name}" for n, policy in enumerate(LEGAL)])
def test_every_policy_keeps_the_joint_law(policy, rates):
    for seed, vocab, count in CASES:
        for cap in (GAMMA * count, 1):
            assert error(toys(seed, vocab, count), deciding(policy.select, seed, count, rates, cap)) < 1e-12


def deciding(select, seed: int, count: int, rates, cap: int | None = None):
    """A policy as `error` asks it."""
    lagged = histories(seed, count)
    return lambda chances: select(choice(chances, lagged, rates, cap=cap))


def best_of_current(c: Choice) -> list[int]:
    ranking = rank(survivals(c.chances))
    rate = gains(float(c.sequences), ranking.survival) / c.seconds[: len(ranking) + 1]
    return ranking.lengths(int(rate.argmax()), len(c.length))


def patient(c: Choice) -> list[int]:
    """Algorithm 1 that looks past one dip."""
    ranking = rank(survivals(c.chances))
    rate = gains(float(c.sequences), ranking.survival) / c.seconds[: len(ranking) + 1]
    best, dips = 0, 0
    for k in range(1, len(rate)):
        if rate[k] > rate[best]:
            best, dips = k, 0
        elif (dips := dips + 1) > 1:
            break
    return ranking.lengths(best, len(c.length))


def last_above(c: Choice) -> list[int]:
    return [max((k + 1 for k, x in enumerate(b) if x >= 0.6), default=0) for b in c.chances]


def late_ties_first(c: Choice) -> list[int]:
    """The top candidate, ties broken towards later positions."""
    order = sorted(
        (-a, -k, r) for r, row in enumerate(survivals(c.chances)) for k, a in enumerate(row) if a > 0
    )
    lengths = [0] * len(c.length)
    for _, k, r in order[:1]:
        lengths[r] = -k + 1
    return lengths


def count_that_tells(c: Choice) -> list[int]:
    """Look-ahead whose forecast is as long as the number of candidates that are alive."""
    ranking = rank(survivals(c.chances))
    lagged = np.sort(c.lagged, axis=None)[::-1][: len(ranking)]
    return ranking.lengths(look_ahead(ranking.survival, lagged, float(c.sequences), c.seconds), len(c.length))


@pytest.mark.parametrize("illegal", [best_of_current, patient, last_above, late_ties_first, count_that_tells])
def test_what_looks_ahead_is_caught(illegal):
    worst = 0.0
    for rates in STEPS_A_SECOND:
        for seed, vocab, count in [*CASES, *((seed, 2, 1 + seed % 2) for seed in range(6, 60))]:
            found = error(toys(seed, vocab, count), deciding(illegal, seed, count, rates))
            worst = max(worst, found)
    assert worst > 0.01


def test_appendix_a():
    """The paper's counter-example: whichever token was drafted, nothing is verified; a search differs."""
    rates = (1.0, 0.5, 0.45)
    for second in (0.9, 0.0):
        step = choice([(0.8, second)], [(0.0, 0.0)], rates)
        assert Algorithm1().select(step) == [0]
        assert LookAhead().select(step) == [0]
    found = [best_of_current(choice([(0.8, second)], [(0.0, 0.0)], rates)) for second in (0.9, 0.0)]
    assert found == [[2], [0]]


def test_the_fact_sheets_vectors():
    certain = [Drafted(3, (1.0, 1.0, 1.0), (1.0, 1.0, 1.0))]
    one_more = Choice.of(certain, 1, 1, np.array([1.0, 1.0]))
    assert [policy.select(one_more) for policy in (LookAhead(), Algorithm1(), Lagged())] == [[1]] * 3
    likely = [Drafted(3, (0.9, 0.8, 0.7), (0.9, 0.7, 0.5)), Drafted(2, (0.5, 0.4), (0.6, 0.2))]
    flat = Choice.of(likely, 2, 5, np.ones(6))
    halved = Choice.of(likely, 2, 5, np.array([1.0, 3.0, 3.0, 3.0, 3.0, 3.0]))
    for policy in (LookAhead(), Algorithm1(), Lagged()):
        assert policy.select(flat) == [3, 2]  # rows cost nothing: verify all
        assert policy.select(halved) == [0, 0]


def test_free_requests_are_searched_on_what_they_are():
    """A dip that look-ahead may not look past, unless nothing is guarded."""
    rates = (1.0, 0.5, 0.45, 0.3, 0.3)
    lucky = [(0.8, 0.99)]
    assert LookAhead().select(choice(lucky, [(0.0, 0.0)], rates)) == [0]
    assert LookAhead().select(choice(lucky, [(0.0, 0.0)], rates, guarded=[False])) == [2]


@pytest.mark.parametrize("rates", STEPS_A_SECOND)
def test_in_mixed_batches_the_guarded_keep_their_law(rates):
    """The free request's text cannot depend on lengths; the guarded one's must not."""
    for seed in range(12):
        free, guarded = toys(seed, 2, 2)
        lagged = histories(seed, 2)
        for draft, _ in free.drafts():  # whatever the free one drafted
            assert error([guarded], beside(free.chances(draft), lagged, rates)) < 1e-12


def beside(free: tuple[float, ...], lagged, rates):
    """Look-ahead for one guarded request beside a free one with these chances."""

    def decide(chances):
        step = choice([free, chances[0]], lagged, rates, guarded=[False, True])
        return LookAhead().select(step)[1:]

    return decide


def plain(current: list[float], forecast: list[float], start: float, seconds: list[float]) -> int:
    """The rule of look-ahead, a candidate at a time."""
    tau, k = start, 0
    while k < len(current) and current[k] > 0.0:
        promises = (
            (tau + current[k] + sum(forecast[k + 1 : goal])) / seconds[goal]
            for goal in range(k + 1, len(current) + 1)
        )
        if not max(promises) > tau / seconds[k]:
            return k
        tau += current[k]
        k += 1
    return k


CHANCES = st.lists(st.floats(0.0, 1.0), max_size=10)


@given(CHANCES, st.data())
@settings(max_examples=300, deadline=None)
def test_stretches_are_the_plain_rule(current, data):
    size = len(current)
    current = sorted(current, reverse=True)
    forecast = sorted(data.draw(st.lists(st.floats(0.0, 1.0), min_size=size, max_size=size)), reverse=True)
    steps = data.draw(st.lists(st.floats(0.0, 2.0), min_size=size, max_size=size))
    seconds = np.cumsum([1.0, *steps])
    found = look_ahead(np.array(current), np.array(forecast), 2.0, seconds)
    wanted = plain(current, forecast, 2.0, seconds.tolist())
    if found != wanted:  # only where rounding decides
        tau = 2.0 + np.concatenate(([0.0], np.cumsum(current)))
        k = min(found, wanted)
        best = max(
            (tau[k + 1] + sum(forecast[k + 1 : goal])) / seconds[goal] for goal in range(k + 1, size + 1)
        )
        assert best == pytest.approx(tau[k] / seconds[k], rel=1e-9)


@given(st.lists(st.lists(st.floats(-1.0, 2.0) | st.just(math.nan), max_size=5), max_size=6))
@settings(max_examples=200, deadline=None)
def test_ranking_is_the_plain_sort(rows):
    candidates = []
    for block, row in enumerate(rows):
        alive = 1.0
        for position, chance in enumerate(row):
            alive *= 0.0 if math.isnan(chance) else min(max(chance, 0.0), 1.0)
            if alive > 0.0:
                candidates.append((-alive, position, block))
    candidates.sort()
    ranking = rank(survivals(table(rows)))
    assert ranking.block.tolist() == [block for _, _, block in candidates]
    assert ranking.survival.tolist() == [-alive for alive, _, _ in candidates]
    for count in range(len(ranking) + 1):  # always prefixes
        for block, length in enumerate(ranking.lengths(count, len(rows))):
            assert {p for _, p, b in candidates[:count] if b == block} == set(range(length))


@pytest.mark.parametrize("policy", [LookAhead(), Lagged()], ids=lambda policy: policy.name)
@pytest.mark.parametrize("lagged", [0.0, 1e-9, 0.4])
@pytest.mark.parametrize("guarded", [True, False])
def test_padding_is_filled_with_drafts(policy, lagged, guarded):
    """Where steps of 3 to 6 rows cost the same, none stops in between, however little is expected."""
    chances = [(0.9, 0.001, 0.001)] * 2
    rates = [1.0] + [0.98] * 4 + [0.2] * 2
    step = choice(chances, [(lagged,) * 3] * 2, rates, [guarded] * 2)
    # Lagged knows nothing but the round before: if that promised nothing, not even one draft pays.
    stays = policy.name == "lagged" and lagged < 0.01
    assert sum(policy.select(step)) == (0 if stays else 4)


def test_of_equal_rates_the_largest_batch_is_taken():
    assert best_count(np.zeros(3), 1.0, np.array([1.0, 1.0, 1.0, 2.0])) == 2
    assert best_count(np.array([0.5, 0.0, 0.0]), 1.0, np.array([1.0, 1.1, 1.1, 2.0])) == 2
    assert best_count(np.zeros(0), 1.0, np.array([1.0])) == 0


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_few_candidates_are_decided_on_as_many_are(data):
    """In plain numbers as in arrays: guarded or not, dead or tied, on curves and staircases."""
    number = st.sampled_from((0.0, 0.25, 0.5, 1.0, 1.5, -1.0, math.nan)) | st.floats(0.01, 0.99)
    blocks = []
    for _ in range(data.draw(st.integers(1, 5))):
        length = data.draw(st.integers(0, 6))
        chances, before = (tuple(data.draw(st.lists(number, min_size=length, max_size=length))) for _ in "ab")
        lagged = survivals(table([before]))[0]
        blocks.append(Drafted(length, chances, tuple(lagged.tolist()), data.draw(st.booleans())))
    total = sum(block.length for block in blocks)
    cap = data.draw(st.integers(0, total))
    costs = data.draw(st.lists(st.sampled_from((0.0, 0.1, 0.5, 2.0)), min_size=cap, max_size=cap))
    seconds = np.cumsum([1.0, *costs])
    step = Choice.of(blocks, data.draw(st.integers(1, 8)), cap, seconds)
    assert LookAhead().select_few(in_few(step)) == LookAhead().select(step)
