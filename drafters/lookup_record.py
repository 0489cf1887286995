"""How often looked-up tokens are accepted: by the length of the match, and in each text of late.

A match that has just been extended by an accepted token is one token longer, so one table serves all
positions of a block.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np

_LONGEST = 12  # match that is told apart
_PRIOR = 4.0  # tokens that all texts together count for a new one
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
        lengths = np.arange(_LONGEST + 1)
        self._tried = np.full((2, _LONGEST + 1), 4.0)
        # Longer matches hold better: what is assumed until there are counts.
        self._accepted = self._tried * np.minimum(0.2 + 0.1 * lengths, 0.9)
        self._texts: OrderedDict[int, _Text] = OrderedDict()

    def chances(self, sequence: int, match: int, count: int, greedy: bool) -> tuple[float, ...]:
        """Conditional acceptance of each of `count` tokens after a match: the text's next block."""
        text = self._text(sequence)
        text.match, text.greedy = match, greedy
        lengths = np.minimum(match + np.arange(count), _LONGEST)
        everyone = self._accepted[int(greedy), lengths] / self._tried[int(greedy), lengths]
        out: list[float] = ((text.accepted + _PRIOR * everyone) / (text.tried + _PRIOR)).tolist()
        # Also where nothing was verified: what was not tried for long is worth another try.
        text.accepted *= _FADE
        text.tried *= _FADE
        return tuple(out)

    def observe(self, sequence: int, verified: int, accepted: int) -> None:
        """Of a text's looked-up block so many tokens were verified, and so many accepted."""
        text = self._texts.get(sequence)
        if text is None:
            return
        tried = min(accepted + 1, verified)
        text.accepted += accepted
        text.tried += tried
        row = int(text.greedy)
        self._tried[row] *= _DECAY
        self._accepted[row] *= _DECAY
        lengths = np.minimum(text.match + np.arange(tried), _LONGEST)
        np.add.at(self._tried[row], lengths, 1.0)
        np.add.at(self._accepted[row], lengths[:accepted], 1.0)

    def _text(self, sequence: int) -> _Text:
        text = self._texts.pop(sequence, None) or _Text()
        self._texts[sequence] = text
        if len(self._texts) > _MOST_SEQUENCES:
            self._texts.popitem(last=False)
        return text
