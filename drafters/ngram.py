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
                self._record.observe(item.sequence, item.verify, verdict.accepted)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftBlock | None]:
        return [self._block(request) for request in requests]

    def _block(self, request: DraftRequest) -> DraftBlock | None:
        match, tokens = self._look_up(request.tokens[-self.window :], request.looked_up)
        if not tokens:
            return None
        greedy = request.state.params.greedy
        chances = self._record.chances(request.sequence, match, len(tokens), greedy)
        return DraftBlock(tokens, chances=chances)

    def _look_up(self, tokens: Tokens, slots: int) -> tuple[int, tuple[int, ...]]:
        """(length of the match, what followed it)"""
        # Ends of earlier occurrences of the last token; each longer tail only filters them.
        ends = (tokens[:-1] == tokens[-1]).nonzero()[0]
        best, match = None, 0
        for n in range(1, min(self.max_n, len(tokens) - 1) + 1):
            if n > 1:
                ends = ends[ends >= n - 1]
                ends = ends[tokens[ends - (n - 1)] == tokens[-n]]
            if not len(ends):
                break
            if n >= self.min_n:
                best, match = int(ends[-1]), n
        if best is None:
            return 0, ()
        return match, tuple(tokens[best + 1 : best + 1 + slots].tolist())
