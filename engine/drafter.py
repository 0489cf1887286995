"""What the engine asks of a drafter. The engine never imports one; it is handed one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.batch import DraftBlock, Tokens, Verdict, VerificationBatch
from engine.sampling import SamplingState


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """One sequence that shall be drafted for.

    `tokens` ends with the anchor, whose position is len(tokens) - 1. `slots` is how many tokens to propose at
    most, `looked_up` if none of them is computed. `pages` hold the drafter's context K/V beside the target's.
    Draws use `state.stream` keyed by (anchor, round, slot, Purpose.DRAFT), or coupled noise when the request
    is seeded; `state` must not be advanced (fork it to run ahead).
    """

    sequence: int
    tokens: Tokens
    slots: int
    round: int
    pages: Tokens
    state: SamplingState
    lookup_slots: int = 0

    @property
    def anchor(self) -> int:
        return len(self.tokens) - 1

    @property
    def looked_up(self) -> int:
        """How many tokens to propose that are not computed."""
        return max(self.slots, self.lookup_slots)


class Drafter(Protocol):
    """Proposes tokens. Called by the worker only, never concurrently."""

    #: short name for logs and metrics
    name: str
    #: target layers whose outputs it needs as features (0-based, -1: embedding); empty: none are captured
    feature_layers: tuple[int, ...]
    #: what the drafter's half of a page depends on besides tokens; part of the page's key
    identity: str

    def observe(
        self, batch: VerificationBatch, features: torch.Tensor | None, verdicts: Sequence[Verdict]
    ) -> None:
        """See a verified step, drafting or not: write context K/V from the features of verified rows.

        features [T, m*d] are all rows'; of an item that verified, only the first 1 + accepted are final.
        """

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftBlock | None]:
        """Propose for each request, in order; None or fewer tokens than slots is allowed."""
