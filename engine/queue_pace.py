"""How fast seats come free while others wait, and so how long a newcomer would."""

from __future__ import annotations

#: weight of one seat in the running mean
_WEIGHT = 0.05


class QueuePace:
    """Told after each step's admission; seconds of any steady clock.

    Only times in which somebody waited count: a seat taken at once says nothing of how long one holds it.
    """

    def __init__(self) -> None:
        self._pace: float | None = None  # seconds from one seat to the next
        self._since: float | None = None  # the last seat given away while others waited

    def admitted(self, seated: int, waiting: int, now: float) -> None:
        """`seated` left the queue just now, `waiting` are still in it."""
        if self._since is not None and seated > 0:
            sample = (now - self._since) / seated
            if self._pace is None:
                self._pace = sample
            else:
                self._pace += (1.0 - (1.0 - _WEIGHT) ** seated) * (sample - self._pace)
            self._since = now
        if waiting == 0:
            self._since = None
        elif self._since is None:
            self._since = now

    def wait(self, waiting: int, guess: float) -> float:
        """Seconds until `waiting` sequences have been seated; `guess` a seat as long as nothing is known."""
        return waiting * (guess if self._pace is None else self._pace)
