"""Whether drafts are looked up: always, unless what was found has long promised too little.

Looking up needs no model, but a step that takes some milliseconds notices it all the same: searching, ranking
and keeping count take several percent of it, measured at four and eight sequences.
"""

from __future__ import annotations

_MARGIN = 0.06  # faster than without drafts, rows counted: less is not worth the trouble
_WEIGHT = 0.1  # of a step that had looked-up blocks
_REST_STEPS = 8  # between two tries while it is not worth it


class LookupPlan:
    """Remembers how much faster steps with looked-up blocks were expected to be; told by the loop only."""

    def __init__(self) -> None:
        self._worth = 0.1
        self._steps = 0

    def wanted(self) -> bool:
        """For the step that is being planned; asked once a step."""
        self._steps += 1
        return self._worth >= _MARGIN or self._steps % _REST_STEPS == 0

    def observe(self, gain: float) -> None:
        """A step with looked-up blocks promised so much more speed than it would have had without drafts."""
        self._worth += _WEIGHT * (gain - self._worth)
