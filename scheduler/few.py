"""Look-ahead in plain numbers: what `scheduler.adaptive` decides with arrays, for a few candidates.

At a stream or two a step has a handful of candidates and takes some milliseconds, of which arrays so small
would take several percent. The tests hold both against each other; sums are taken in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.policy import FewChoice

#: candidates up to which this is the faster way
FEW = 32

Rows = Sequence[Sequence[float]]


def survivals(chances: Rows) -> list[list[float]]:
    """Of conditional chances, which need not be sane: see `scheduler.ranking.survivals`."""
    out = []
    for row in chances:
        survival, alive = 1.0, []
        for chance in row:
            survival *= min(chance, 1.0) if chance > 0.0 else 0.0  # what is no number is not above 0
            alive.append(survival)
        out.append(alive)
    return out


def rank(alive: Rows) -> list[tuple[float, int]]:
    """(survival, block) of all candidates in rank order."""
    found = [
        (-survival, position, block)
        for block, row in enumerate(alive)
        for position, survival in enumerate(row)
        if survival > 0.0
    ]
    found.sort()
    return [(-survival, block) for survival, _, block in found]


def lengths(candidates: Sequence[tuple[float, int]], blocks: int) -> list[int]:
    """Verify lengths of all blocks when these candidates are admitted."""
    out = [0] * blocks
    for _, block in candidates:
        out[block] += 1
    return out


def best_count(candidates: Sequence[tuple[float, int]], start: float, seconds: Sequence[float]) -> int:
    """See `scheduler.lookahead.best_count`."""
    best, count, gained = start / seconds[0], 0, 0.0
    for k, (survival, _) in enumerate(candidates, 1):
        gained += survival
        rate = (gained + start) / seconds[k]
        if rate >= best:
            best, count = rate, k
    return count


def look_ahead(
    current: Sequence[float], forecast: Sequence[float], start: float, seconds: Sequence[float]
) -> int:
    """See `scheduler.lookahead.look_ahead`; both rows have the same length."""
    tau, ahead = gains(start, current), gains(0.0, forecast)
    rate = [tokens / time for tokens, time in zip(tau, seconds, strict=False)]
    count, k = len(current), 0
    alive = sum(survival > 0.0 for survival in current)
    while k < alive:
        known = tau[k + 1] - ahead[k + 1]
        best, goal = -1.0, k
        for size in range(k + 1, count + 1):
            promised = (known + ahead[size]) / seconds[size]
            if promised > best:
                best, goal = promised, size
        if best <= rate[k]:
            return k
        k += 1
        while k < goal and (tau[k + 1] - ahead[k + 1] + ahead[goal]) / seconds[goal] > rate[k]:
            k += 1
    return alive


def gains(start: float, survival: Sequence[float]) -> list[float]:
    """See `scheduler.ranking.gains`."""
    out, gained = [start], 0.0
    for each in survival:
        gained += each
        out.append(gained + start)
    return out


def select(choice: FewChoice) -> list[int]:
    """Verify lengths by look-ahead; see `scheduler.adaptive.LookAhead`."""
    ranking, seconds, guarded = rank(choice.alive), choice.seconds, choice.guarded
    start, count, cap = float(choice.sequences), len(guarded), choice.row_cap
    if not any(guarded):
        return lengths(ranking[: best_count(ranking[:cap], start, seconds)], count)
    free = [each for each in ranking if not guarded[each[1]]]
    size = min(sum(choice.length), cap)
    expected = [survival for survival, _ in free]
    for row, held in zip(choice.lagged, guarded, strict=True):
        if held:
            expected += row
    expected.sort(reverse=True)
    known = [survival for survival, _ in ranking]
    admitted = ranking[: look_ahead(_filled(known, size), _filled(expected, size), start, seconds)]
    out = lengths(admitted, count)
    if not free:
        return out
    held_rows = [survival for survival, block in admitted if guarded[block]]
    room = free[: cap - len(held_rows)]
    start += gains(0.0, held_rows)[-1]
    again = lengths(room[: best_count(room, start, seconds[len(held_rows) :])], count)
    return [length if held else new for length, held, new in zip(out, guarded, again, strict=True)]


def _filled(values: Sequence[float], size: int) -> list[float]:
    return [*values[:size], *[0.0] * (size - len(values))]
