"""Noticing, while an open loop runs, that the server falls ever further behind."""

from __future__ import annotations

from loadtest.observe import Observation
from loadtest.stats import trend

#: seconds before which nothing is said
_PATIENCE = 10.0


def saturated(seen: Observation) -> str | None:
    """A reason if requests in flight and time to first token both surely and steeply grow, else None.

    Steep: by more than their mean level over the span, which a queue that only fills once does not do.
    """
    first = seen.ticks[0] if seen.ticks else []
    if not first or first[-1].time - seen.begin < _PATIENCE:
        return None
    # Levels are strongly dependent from tick to tick: one a second is nearer to what the test supposes.
    levels: dict[int, int] = {}
    for process in seen.ticks:
        own = {int(tick.time - seen.begin): tick.in_flight for tick in process if tick.time > seen.begin}
        for second, count in own.items():
            levels[second] = levels.get(second, 0) + count
    growth, sure = trend([float(second) for second in levels], [float(level) for level in levels.values()])
    if not sure or growth <= 1.0:
        return None
    answered = [r for r in seen.records if r.kind == "load" and r.ttft is not None]
    growth, sure = trend([r.intended for r in answered], [r.ttft or 0.0 for r in answered])
    if not sure or growth <= 1.0:
        return None
    return f"saturated: {list(levels.values())[-1]} requests in flight and rising, TTFT rising"
