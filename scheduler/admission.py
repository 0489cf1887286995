"""Who runs in the next step: anchors first, then prefill chunks, then newcomers; drafts get what is left.

First come, first served with ageing: a newcomer whose pages do not fit is passed over for smaller ones,
until it has waited `patience` seconds; from then on nobody behind it is admitted, so that pages gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Running:
    """A sequence with pages. `pending` tokens lack K/V; a decoding one has 1, its anchor.

    `missing` pages are needed for its next rows, `surplus` ones are held for drafts only, and
    `reclaimable` is what preempting it would give back (surplus included).
    `scored`: the logits of all its rows are needed.
    """

    key: int
    pending: int
    missing: int = 0
    surplus: int = 0
    reclaimable: int = 0
    scored: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """A sequence without pages: `pending` tokens to compute and `pages` to take if admitted now."""

    key: int
    pending: int
    pages: int
    waited: float = 0.0
    scored: bool = False


@dataclass(frozen=True, slots=True)
class Limits:
    """token_budget rows a step, max_sequences with pages at once, patience in seconds.

    `scored_rows`: so many rows of scored prompts a step, since each of them holds a vocabulary of logits.
    """

    token_budget: int
    max_sequences: int
    patience: float = 5.0
    scored_rows: int = 128


@dataclass(slots=True)
class StepPlan:
    """rows: known tokens to run, by key. `shed`: give back all surplus pages (and the drafts they are for).

    `spare_rows` are left for drafts, `spare_pages` remain after everything above.
    """

    rows: dict[int, int] = field(default_factory=dict)
    admitted: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    shed: bool = False
    spare_rows: int = 0
    spare_pages: int = 0


def plan_step(
    running: Sequence[Running], waiting: Iterable[Waiting], available_pages: int, limits: Limits
) -> StepPlan:
    """Decide one step. `running` and `waiting` are in order of arrival; `waiting` is read lazily.

    Every page need of the present step is met within `available_pages` plus what shedding and preempting
    give back; the latest arrivals are preempted first.
    """
    plan = StepPlan()
    alive = list(running)
    pages = available_pages

    needed = sum(work.missing for work in alive)
    if needed > pages:
        plan.shed = True
        pages += sum(work.surplus for work in alive)
    while needed > pages and alive:
        victim = alive.pop()
        plan.preempted.append(victim.key)
        pages += victim.reclaimable - victim.surplus
        needed -= victim.missing
    pages -= needed

    rows, scored = limits.token_budget, limits.scored_rows
    for work in alive:
        if work.pending == 1:
            plan.rows[work.key] = 1
            rows -= 1
    for work in alive:
        room = min(rows, scored) if work.scored else rows
        if work.pending > 1 and room > 0:
            plan.rows[work.key] = min(work.pending, room)
            rows -= plan.rows[work.key]
            scored -= plan.rows[work.key] if work.scored else 0

    seats = limits.max_sequences - len(alive)
    if not plan.preempted and not plan.shed and seats > 0 and rows > 0:
        for newcomer in waiting:
            room = min(rows, scored) if newcomer.scored else rows
            if room == 0:
                continue
            # Keep a page for each sequence that runs, or newcomers would be preempted at once.
            if newcomer.pages + len(alive) + len(plan.admitted) <= pages or (
                not alive and not plan.admitted and newcomer.pages <= pages
            ):
                plan.admitted.append(newcomer.key)
                plan.rows[newcomer.key] = min(newcomer.pending, room)
                rows -= plan.rows[newcomer.key]
                scored -= plan.rows[newcomer.key] if newcomer.scored else 0
                pages -= newcomer.pages
                seats -= 1
                if seats == 0 or rows == 0:
                    break
            elif newcomer.waited > limits.patience:
                break
    plan.spare_rows, plan.spare_pages = max(rows, 0), pages
    return plan
