"""Whether drafts are looked up: always, unless what was found has long brought too little for its time.

Looking up needs no model, but a step that takes some milliseconds notices it all the same: searching, ranking
and keeping count take several percent of it, measured at four and eight sequences.
"""

from __future__ import annotations

_MARGIN = 0.03  # faster than without drafts: less is not worth the trouble
_WEIGHT = 0.1  # of a step that had looked-up blocks
_REST_STEPS = 16  # between two tries while it is not worth it


class LookupPlan:
    """Remembers how much faster steps with looked-up blocks have been; told by the loop only."""

    def __init__(self) -> None:
        self._worth = 0.05
        self._steps = 0

    def wanted(self) -> bool:
        """For the step that is being planned; asked once a step."""
        self._steps += 1
        return self._worth >= _MARGIN or self._steps % _REST_STEPS == 0

    def observe(self, gain: float) -> None:
        """A step with looked-up blocks took its time for so much more than plain steps bring in it.

        Tokens as they were expected, seconds as they were: one step's tokens would tell too little.
        """
        self._worth += _WEIGHT * (max(gain, -1.0) - self._worth)
