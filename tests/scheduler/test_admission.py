"""Who runs in a step: properties of every plan, and what waiting costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler.admission import Limits, Running, StepPlan, Waiting, plan_step


@dataclass
class Case:
    running: list[Running]
    waiting: list[Waiting]
    available: int
    limits: Limits

    def plan(self) -> StepPlan:
        return plan_step(self.running, self.waiting, self.available, self.limits)

    @property
    def needed(self) -> int:
        return sum(work.missing for work in self.running)

    @property
    def surplus(self) -> int:
        return sum(work.surplus for work in self.running)


WAITED = st.sampled_from([0.0, 4.0, 5.0, 6.0])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """As the engine asks: no more sequences than rows, and nobody both lacks pages and has some to spare."""
    crowded = draw(st.booleans())  # everybody runs and pages are short, where most is decided
    max_sequences = draw(st.integers(4 if crowded else 1, 6))
    limits = Limits(draw(st.integers(max_sequences, 30)), max_sequences, 5.0, draw(st.integers(1, 30)))
    scored = st.booleans() if draw(st.booleans()) else st.just(False)
    count = max_sequences - 1 if crowded else draw(st.integers(0, max_sequences))
    running = []
    for key in range(count):
        pending = draw(st.one_of(st.just(1), st.integers(2, 40)))
        missing, surplus = draw(st.sampled_from([(0, 3), (2, 0), (0, 0), (1, 0), (0, 1)]))
        reclaimable = surplus + draw(st.integers(0, 5))
        running.append(Running(key, pending, missing, surplus, reclaimable, pending > 1 and draw(scored)))
    waiting = [
        Waiting(
            100 + i,
            draw(st.integers(1, 40)),
            draw(st.integers(1, 3) | st.integers(1, 12)),
            draw(WAITED),
            draw(scored),
        )
        for i in range(draw(st.integers(0, 6)))
    ]
    available = draw(st.integers(0, 2 if crowded else 20))
    return Case(running, waiting, available, limits)


def alive(case: Case, plan: StepPlan) -> list[Running]:
    return [work for work in case.running if work.key not in plan.preempted]


@given(cases())
@settings(max_examples=200, deadline=None)
def test_rows_never_exceed_the_budget_and_are_all_accounted_for(case):
    plan = case.plan()
    assert sum(plan.rows.values()) + plan.spare_rows == case.limits.token_budget
    assert plan.spare_rows >= 0
    pending = {work.key: work.pending for work in (*case.running, *case.waiting)}
    assert all(1 <= rows <= pending[key] for key, rows in plan.rows.items())
    assert set(plan.rows) <= {work.key for work in alive(case, plan)} | set(plan.admitted)


@given(cases())
@settings(max_examples=200, deadline=None)
def test_every_page_need_is_met(case):
    plan = case.plan()
    pages = case.available
    if plan.shed:
        pages += case.surplus
    pages += sum(work.reclaimable - work.surplus for work in case.running if work.key in plan.preempted)
    pages -= sum(work.missing for work in alive(case, plan))
    assert pages >= 0
    pages -= sum(work.pages for work in case.waiting if work.key in plan.admitted)
    assert pages == plan.spare_pages >= 0


@given(cases())
@settings(max_examples=200, deadline=None)
def test_anchors_run_first_then_prefills_in_order_of_arrival(case):
    plan = case.plan()
    here = alive(case, plan)
    assert all(plan.rows.get(work.key) == 1 for work in here if work.pending == 1)
    left = case.limits.token_budget - sum(work.pending == 1 for work in here)
    scored = case.limits.scored_rows

    def take(work: Running | Waiting) -> int:
        nonlocal left, scored
        rows = min(work.pending, left, scored if work.scored else left)
        left -= rows
        scored -= rows if work.scored else 0
        return rows

    for work in here:
        if work.pending > 1:
            assert plan.rows.get(work.key, 0) == take(work)
    for key in plan.admitted:
        assert left > 0
        assert plan.rows[key] == take(next(work for work in case.waiting if work.key == key)) > 0


@given(cases())
@settings(max_examples=200, deadline=None)
def test_prompts_that_are_scored_share_a_bound_of_their_own(case):
    """Each row of theirs holds a vocabulary of logits: memory must not grow with their number."""
    plan = case.plan()
    scored = {work.key for work in (*case.running, *case.waiting) if work.scored}
    assert sum(rows for key, rows in plan.rows.items() if key in scored) <= case.limits.scored_rows


@given(cases())
@settings(max_examples=200, deadline=None)
def test_the_latest_are_preempted_first_and_no_more_than_it_takes(case):
    plan = case.plan()
    keys = [work.key for work in case.running]
    assert plan.preempted == keys[::-1][: len(plan.preempted)]
    if plan.preempted:
        spared = next(work for work in case.running if work.key == plan.preempted[-1])
        given_back = sum(
            work.reclaimable - work.surplus for work in case.running if work.key in plan.preempted[:-1]
        )
        needed = sum(work.missing for work in alive(case, plan)) + spared.missing
        assert needed > case.available + case.surplus + given_back, "preempted in vain"


@given(cases())
@settings(max_examples=200, deadline=None)
def test_drafts_go_before_anyone_is_preempted(case):
    plan = case.plan()
    assert plan.shed == (case.needed > case.available)
    assert bool(plan.preempted) == (case.needed > case.available + case.surplus)
    if plan.shed:
        assert plan.admitted == [], "newcomers would take what was just given up"


@given(cases())
@settings(max_examples=300, deadline=None)
def test_newcomers_come_in_order_pass_only_those_that_do_not_fit_and_no_impatient_one(case):
    plan = case.plan()
    here = len(alive(case, plan))
    assert here + len(plan.admitted) <= case.limits.max_sequences
    if plan.shed:
        return
    pages, rows = case.available - case.needed, case.limits.token_budget
    rows -= sum(plan.rows.get(work.key, 0) for work in case.running)
    scored = case.limits.scored_rows - sum(plan.rows.get(work.key, 0) for work in case.running if work.scored)
    admitted: list[int] = []
    for work in case.waiting:
        if rows == 0 or here + len(admitted) == case.limits.max_sequences:
            break
        room = min(rows, scored) if work.scored else rows
        if room == 0:
            continue
        others = here + len(admitted)
        fits = work.pages + others <= pages if others else work.pages <= pages
        if fits:
            admitted.append(work.key)
            pages -= work.pages
            rows -= min(work.pending, room)
            scored -= min(work.pending, room) if work.scored else 0
        elif work.waited > case.limits.patience:
            break
    assert plan.admitted == admitted


def test_whoever_waits_is_looked_at_only_while_there_is_room():
    looked = []

    def queue() -> Iterator[Waiting]:
        for key in range(10):
            looked.append(key)
            yield Waiting(key, 4, 1)

    assert plan_step([], queue(), 100, Limits(64, 2)).admitted == [0, 1]
    assert looked == [0, 1]
    looked.clear()
    assert plan_step([], queue(), 100, Limits(10, 8)).rows == {0: 4, 1: 4, 2: 2}
    assert looked == [0, 1, 2]
    looked.clear()
    assert plan_step([Running(20, 1)], queue(), 100, Limits(64, 1)).admitted == []
    assert looked == []


def test_a_page_is_kept_for_each_sequence_that_runs():
    limits = Limits(64, 8)
    one = [Running(0, 1)]
    assert plan_step(one, [Waiting(1, 4, 3)], 3, limits).admitted == []
    assert plan_step(one, [Waiting(1, 4, 3)], 4, limits).admitted == [1]
    assert plan_step([], [Waiting(1, 4, 3)], 3, limits).admitted == [1], "alone it may have all"


def test_a_preempted_sequence_gives_back_what_shedding_has_not():
    running = [Running(0, 1, missing=3, reclaimable=4), Running(1, 1, surplus=2, reclaimable=5)]
    plan = plan_step(running, [Waiting(2, 4, 1)], 0, Limits(64, 8))
    assert (plan.shed, plan.preempted, plan.spare_pages) == (True, [1], 5 - 3)
    assert plan.rows == {0: 1}
    assert plan_step(running, [], 1, Limits(64, 8)).preempted == [], "shedding is enough"


def test_nobody_is_admitted_in_a_step_that_sheds():
    running = [Running(0, 1, missing=1, reclaimable=4), Running(1, 1, surplus=9, reclaimable=12)]
    plan = plan_step(running, [Waiting(2, 4, 1)], 0, Limits(64, 8))
    assert (plan.shed, plan.preempted, plan.admitted, plan.spare_pages) == (True, [], [], 8)
    assert plan_step(running, [Waiting(2, 4, 1)], 9, Limits(64, 8)).admitted == [2]


@pytest.mark.parametrize("patience", [3.0, 20.0])
def test_small_ones_pass_a_huge_one_until_it_has_waited_long_enough(patience):
    """One small request arrives a second, each runs for four; the huge one needs all the pages."""
    pages, limits = 8, Limits(64, 8, patience)
    running = [(Running(-1, 1, reclaimable=2), 4)]  # and when it ends
    queue = [(0, 8, 0)]  # key, pages, arrival
    passed, huge = 0, None
    for now in range(1, 60):
        running = [(work, end) for work, end in running if end > now]
        queue.append((now, 2, now))
        free = pages - sum(work.reclaimable for work, _ in running)
        waiting = [Waiting(key, 4, size, now - arrived) for key, size, arrived in queue]
        plan = plan_step([work for work, _ in running], waiting, free, limits)
        assert not plan.preempted
        for key in plan.admitted:
            [entry] = [entry for entry in queue if entry[0] == key]
            queue.remove(entry)
            running.append((Running(key, 1, reclaimable=entry[1]), now + 4))
            if key == 0:
                huge = now
        passed += huge is None and len(plan.admitted)
        if huge is not None:
            break
    assert passed >= patience / 2, "small ones had to wait although there was room"
    assert huge is not None, "the huge one starved"
    assert patience < huge <= patience + 6, "guaranteed as soon as those that run have ended"
