"""How often looked-up tokens are accepted: by the length of the match, and in each text of late.

A match that has just been extended by an accepted token is one token longer, so one table serves all
positions of a block. Plain numbers throughout: blocks are short, and this runs for each of them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

_LONGEST = 12  # match that is told apart
_PRIOR = 4.0  # tokens that all texts together count for a new one, and assumptions for all texts
_DECAY = 0.999  # of what all texts did, a block
_FADE = 0.9  # of what a text did, a block that was found in it
_MOST_SEQUENCES = 4096
#: Longer matches hold better: what is assumed where little is counted.
_ASSUMED = [min(0.2 + 0.1 * match, 0.9) for match in range(_LONGEST + 1)]


@dataclass
class _Text:
    accepted: float = 0.0
    tried: float = 0.0
    match: int = 0  # of the block that may be verified next
    greedy: bool = False


class LookupRecord:
    """Counts of accepted and tried tokens, fading; a token behind the first rejection was never tried."""

    def __init__(self) -> None:
        # By how the request samples (greedily or not), then by length of the match.
        self._tried = [[0.0] * (_LONGEST + 1) for _ in range(2)]
        self._accepted = [[0.0] * (_LONGEST + 1) for _ in range(2)]
        self._texts: OrderedDict[int, _Text] = OrderedDict()

    def chances(self, sequence: int, match: int, count: int, greedy: bool) -> tuple[float, ...]:
        """Conditional acceptance of each of `count` tokens after a match: the text's next block."""
        text = self._text(sequence)
        text.match, text.greedy = match, greedy
        accepted, tried = self._accepted[greedy], self._tried[greedy]
        out = []
        for place in range(match, match + count):
            length = min(place, _LONGEST)
            everyone = (accepted[length] + _PRIOR * _ASSUMED[length]) / (tried[length] + _PRIOR)
            out.append((text.accepted + _PRIOR * everyone) / (text.tried + _PRIOR))
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
        for table, count in ((self._tried, decided), (self._accepted, accepted)):
            own = table[text.greedy] = [each * _DECAY for each in table[text.greedy]]
            for place in range(text.match, text.match + count):
                own[min(place, _LONGEST)] += 1.0

    def _text(self, sequence: int) -> _Text:
        text = self._texts.pop(sequence, None) or _Text()
        self._texts[sequence] = text
        if len(self._texts) > _MOST_SEQUENCES:
            self._texts.popitem(last=False)
        return text
