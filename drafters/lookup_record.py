"""How often looked-up tokens are accepted: by the length of the match, and in each text of late.

A match that has just been extended by an accepted token is one token longer, so one table serves all
positions of a block.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

_LONGEST = 12  # match that is told apart
_PRIOR = 4.0  # tokens that all texts together count for a new one, and assumptions for all texts
_DECAY = 0.999  # of what all texts did, a block
_FADE = 0.9  # of what a text did, a block that was found in it
_MOST_SEQUENCES = 4096


@dataclass
class _Text:
    accepted: float = 0.0
    tried: float = 0.0
    match: int = 0  # of the block that may be verified next
    greedy: bool = False


class LookupRecord:
    """Counts of accepted and tried tokens, fading; a token behind the first rejection was never tried."""

    def __init__(self) -> None:
        # Longer matches hold better: what is assumed where little is counted.
        self._assumed = np.minimum(0.2 + 0.1 * np.arange(_LONGEST + 1), 0.9)
        self._tried, self._accepted = np.zeros((2, _LONGEST + 1)), np.zeros((2, _LONGEST + 1))
        self._texts: OrderedDict[int, _Text] = OrderedDict()

    def chances(self, sequence: int, match: int, count: int, greedy: bool) -> tuple[float, ...]:
        """Conditional acceptance of each of `count` tokens after a match: the text's next block."""
        text = self._text(sequence)
        text.match, text.greedy = match, greedy
        lengths = np.minimum(match + np.arange(count), _LONGEST)
        accepted, tried = self._accepted[int(greedy), lengths], self._tried[int(greedy), lengths]
        everyone = (accepted + _PRIOR * self._assumed[lengths]) / (tried + _PRIOR)
        out: list[float] = ((text.accepted + _PRIOR * everyone) / (text.tried + _PRIOR)).tolist()
        # Also where nothing was verified: what was not tried for long is worth another try.
        text.accepted *= _FADE
        text.tried *= _FADE
        return tuple(out)

    def observe(self, sequence: int, decided: int, accepted: int) -> None:
        """Of a text's looked-up block so many tokens were decided on, and so many accepted."""
        text = self._texts.get(sequence)
        if text is None:
            return
        text.accepted += accepted
        text.tried += decided
        row = int(text.greedy)
        self._tried[row] *= _DECAY
        self._accepted[row] *= _DECAY
        lengths = np.minimum(text.match + np.arange(decided), _LONGEST)
        np.add.at(self._tried[row], lengths, 1.0)
        np.add.at(self._accepted[row], lengths[:accepted], 1.0)

    def _text(self, sequence: int) -> _Text:
        text = self._texts.pop(sequence, None) or _Text()
        self._texts[sequence] = text
        if len(self._texts) > _MOST_SEQUENCES:
            self._texts.popitem(last=False)
        return text
