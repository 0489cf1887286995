"""One choice of a request, from its prompt to its end."""

from __future__ import annotations

from enum import Enum

import numpy as np

from engine.batch import DraftBlock, Tokens
from engine.outputs import FinishReason
from engine.pages import PageKey
from engine.sampling import SamplingState
from engine.text import TextStream


class Status(Enum):
    """WAITING -> RUNNING -> FINISHED; preemption goes back to WAITING, abort may end it anywhere."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Tokens, pages and state of one text.

    `length` tokens are known; the first `computed` of them have K/V in `pages`, and every one of those is
    committed. The last known token is the anchor once all others are computed. `round` counts the steps that
    sampled for it; it never goes back, so no random number is drawn twice. Of the first `to_score` tokens the
    successors' log probabilities are reported, and `scored` of them have been.
    """

    def __init__(
        self,
        key: int,
        choice: int,
        prompt: Tokens,
        state: SamplingState,
        text: TextStream,
        salt: str,
        priority: int = 0,
        to_score: int = 0,
    ) -> None:
        self.key = key
        self.choice = choice
        self.prompt_length = len(prompt)
        self.state = state
        self.text = text
        self.salt = salt
        self.rank = (priority, key)  # of those that wait and those that run, the lower goes first
        self.to_score = to_score
        self.scored = 0
        self.status = Status.WAITING
        self.aborted = False
        self.finish_reason: FinishReason | None = None
        self.computed = 0
        self.pages: list[int] = []
        self.page_keys: list[PageKey] = []  # of full pages of committed tokens; survives preemption
        self.published = 0  # pages, from the first on, that were offered to the prefix cache
        self.draft: DraftBlock | None = None
        self.chances: list[float] | None = None  # conditional, of the last block that a model drafted
        self.survivals: list[float] | None = None  # [gamma] that are expected of its next one
        self.drafted_round = 0  # in which the last one was verified
        self.round = 0
        self.last_emission: float | None = None
        self._tokens: Tokens = np.array(prompt, dtype=np.int32)
        self.length = len(prompt)

    @property
    def pending(self) -> int:
        """Tokens without K/V; exactly 1, the anchor, while decoding."""
        return self.length - self.computed

    @property
    def generated(self) -> int:
        return self.length - self.prompt_length

    @property
    def tokens(self) -> Tokens:
        """A view of the known tokens. It stays as it is when the sequence grows."""
        return self._tokens[: self.length]

    @property
    def unscored(self) -> bool:
        """Whether rows are left whose logits are to be reported: no page may be skipped that holds any."""
        return self.scored < self.to_score

    def scores(self, rows: int) -> int:
        """How many of the next `rows` rows are to be reported."""
        return max(0, min(self.computed + rows, self.to_score) - max(self.computed, self.scored))

    def extend(self, tokens: tuple[int, ...]) -> None:
        """Append tokens. Views handed out before keep their content: only what lies behind is written."""
        end = self.length + len(tokens)
        if end > len(self._tokens):
            grown = np.empty(max(end, 2 * len(self._tokens), 64), dtype=np.int32)
            grown[: self.length] = self.tokens
            self._tokens = grown
        self._tokens[self.length : end] = tokens
        self.length = end


def insert(queue: list[Sequence], sequence: Sequence) -> None:
    """Keep a queue in order of rank: of priority, then of arrival."""
    at = len(queue)
    while at and queue[at - 1].rank > sequence.rank:
        at -= 1
    queue.insert(at, sequence)
