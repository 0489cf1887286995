"""Look-ahead: admit while some larger batch still promises more tokens a second, as far as one may know.

Candidates are admitted in rank order on current survivals. Whether to admit the next one may depend on what
is revealed by then: survivals of admitted candidates, the next one's own (it depends on earlier tokens only),
and anything of earlier rounds. So the tokens that more candidates would bring are estimated by the sorted
survivals of each request's round before. Requests that no length can bias (greedy, seeded, deterministic
drafts) are known completely, and are searched again on current values once the others' lengths are fixed.
"""

from __future__ import annotations

import numpy as np

from scheduler.ranking import Floats, gains


def look_ahead(current: Floats, forecast: Floats, start: float, seconds: Floats) -> int:
    """How many candidates to admit.

    current [n] are the survivals in rank order, 0 for drafts that will not survive; forecast [n] the expected
    ones, sorted descending; start what the step yields with none; seconds [>= n + 1] what the step takes with
    0, 1, ..., n of them.

    Goes on from k while (tau_k + a_{k+1} + S_K - S_{k+1}) / seconds_K > tau_k / seconds_k for some K > k, S
    being the cumulative forecasts. A K that was found holds until proven otherwise: the search is over whole
    stretches, not candidates.
    """
    count = len(current)
    tau, ahead, time = gains(start, current), gains(0.0, forecast), seconds[: count + 1]
    # What is expected at K if all of 0 .. k + 1 are admitted, less what the forecast says of those after it.
    known = tau[1:] - ahead[1:]
    rate = tau / time
    alive = int((current > 0.0).sum())
    k = 0
    while k < alive:
        promised = (known[k] + ahead[k + 1 :]) / time[k + 1 :]
        best = int(promised.argmax())
        if promised[best] <= rate[k]:
            return k
        goal = k + 1 + best
        holds = (known[k:goal] + ahead[goal]) / time[goal] > rate[k:goal]
        k = goal if holds.all() else k + int(np.argmin(holds))
    return alive


def best_count(survivals: Floats, start: float, seconds: Floats) -> int:
    """The number of candidates with the highest rate, for requests whose values may all be looked at.

    Of several with the same rate the largest: where steps are padded, rows up to the edge cost nothing.
    """
    rate = gains(start, survivals) / seconds[: len(survivals) + 1]
    return int(len(survivals) - rate[::-1].argmax())


def filled(values: Floats, size: int) -> Floats:
    """The first `size` values, zeros behind them where there are fewer."""
    out = np.zeros(size)
    out[: len(values)] = values[:size]
    return out
