"""How fast seats come free while others wait, and so how long a newcomer would."""

from __future__ import annotations

#: weight of one seat in the running mean
_WEIGHT = 0.05


class QueuePace:
    """Told after each step's admission; seconds of any steady clock.

    Only times in which somebody was kept waiting count: a seat taken at once says nothing of how long one
    holds it.
    """

    def __init__(self) -> None:
        self._pace: float | None = None  # seconds from one seat to the next
        self._since: float | None = None  # the last seat given away while others were kept waiting

    def admitted(self, seated: int, held: bool, now: float) -> None:
        """`seated` newcomers left the queue just now; `held`: others could have, had there been room."""
        if self._since is not None and seated > 0:
            sample = (now - self._since) / seated
            if self._pace is None:
                self._pace = sample
            else:
                self._pace += (1.0 - (1.0 - _WEIGHT) ** seated) * (sample - self._pace)
            self._since = now
        if not held:
            self._since = None
        elif self._since is None:
            self._since = now

    def wait(self, waiting: int, now: float, guess: float) -> float:
        """Seconds until `waiting` sequences have been seated; `guess` a seat as long as nothing is known.

        At least as long a seat as the present one is taking: what was quick may hang now.
        """
        stalled = 0.0 if self._since is None else now - self._since
        return waiting * max(guess if self._pace is None else self._pace, stalled)
