"""Prompt lookup: propose what followed the last occurrence of the sequence's own tail.

Needs no training and no model; strong where text repeats itself (Saxena 2023, "prompt lookup decoding").
The proposal is a function of the text alone, so it is deterministic: q is one-hot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafters.lookup_record import LookupRecord
from engine.batch import DraftBlock, Tokens, Verdict, VerificationBatch
from engine.drafter import DraftRequest

# What a grammar leaves no choice about is as good as a long match.
_FORCED = 64


class NgramDrafter:
    """Looks for the longest tail of `max_n` down to `min_n` tokens that occurred before, latest first."""

    name = "ngram"
    feature_layers: tuple[int, ...] = ()
    identity = ""

    def __init__(self, min_n: int = 2, max_n: int = 4, window: int = 8192) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"need 1 <= prompt_lookup_min <= prompt_lookup_max, got {min_n} and {max_n}")
        if window < 1:
            raise ValueError(f"the window must be at least a token, got {window}")
        self.min_n = min_n
        self.max_n = max_n
        self.window = window
        self._record = LookupRecord()

    def observe(
        self, batch: VerificationBatch, features: torch.Tensor | None, verdicts: Sequence[Verdict]
    ) -> None:
        """Count how looked-up blocks fared. The proposals themselves depend on the text alone."""
        for item, verdict in zip(batch.items, verdicts, strict=True):
            if item.verify and item.draft is not None and item.draft.chances is not None:
                self._record.observe(item.sequence, verdict.decided(item.verify), verdict.accepted)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftBlock | None]:
        return [self._block(request) for request in requests]

    def _block(self, request: DraftRequest) -> DraftBlock | None:
        match, tokens = self._look_up(request.tokens[-self.window :], request.looked_up)
        grammar = request.state.grammar
        if grammar is not None and (forced := grammar.forced()):
            match, tokens = _FORCED, tuple(forced[: request.looked_up])
        elif grammar is not None:
            # The block is a function of the text, and so is where it leaves the grammar: cutting it there
            # cannot bias what is emitted. (A block that was drawn would have to stay whole.)
            tokens = tokens[: grammar.legal(tokens)]
        if not tokens:
            return None
        greedy = request.state.params.greedy
        chances = self._record.chances(request.sequence, match, len(tokens), greedy)
        return DraftBlock(tokens, chances=chances)

    def _look_up(self, tokens: Tokens, slots: int) -> tuple[int, tuple[int, ...]]:
        """(length of the match, what followed it)

        Searched as bytes: a step looks up for every sequence, and this is several times as fast as arrays.
        """
        size = tokens.itemsize
        text = tokens.tobytes()
        for n in range(min(self.max_n, len(tokens) - 1), self.min_n - 1, -1):
            tail = text[-n * size :]
            at = text.rfind(tail, 0, len(text) - size)
            while at > 0 and at % size:  # across the bytes of two tokens: not a match
                at = text.rfind(tail, 0, at + len(tail) - 1)
            if at >= 0:
                end = at // size + n
                return n, tuple(tokens[end : end + slots].tolist())
        return 0, ()
