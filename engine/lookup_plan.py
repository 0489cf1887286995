"""Whether drafts are looked up: always, unless what was found has long brought too little for its time.

Looking up needs no model, but a step that takes some milliseconds notices it all the same: searching, ranking
and keeping count take several percent of it, measured at four and eight sequences.
"""

from __future__ import annotations

_MARGIN = 0.03  # faster than without drafts: less is not worth the trouble
_WEIGHT = 0.1  # of a step that had looked-up blocks
#: between two tries while it is not worth it: as few at first, then twice as many after each that was in vain
_REST_STEPS = 16, 128


class LookupPlan:
    """Remembers how much faster steps with looked-up blocks have been; told by the loop only."""

    def __init__(self) -> None:
        self._worth = 0.05
        self._rest = _REST_STEPS[0]
        self._left = self._rest  # steps until the next try

    def wanted(self) -> bool:
        """For the step that is being planned; asked once a step."""
        if self._worth >= _MARGIN:
            return True
        if self._left:
            self._left -= 1
            return False
        self._left = self._rest
        return True

    def observe(self, gain: float) -> None:
        """A step with looked-up blocks took its time for so much more than plain steps bring in it.

        Tokens as they were expected, seconds as they were: one step's tokens would tell too little. A try
        that found nothing in the text is not told of, and says nothing.
        """
        shortest, longest = _REST_STEPS
        if self._worth >= _MARGIN or gain >= _MARGIN:
            self._rest = shortest
        else:
            self._rest = min(2 * self._rest, longest)
        self._left = self._rest
        self._worth += _WEIGHT * (max(gain, -1.0) - self._worth)
