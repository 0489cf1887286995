"""Two drafters as one: prompt lookup where the text repeats itself, a draft model elsewhere.

Chosen per sequence and round by what each is expected to gain, from how often its tokens were accepted in
earlier rounds. The choice is made before the draft model draws anything, so it cannot depend on the block
that it decides about; the lookup's block is a function of the text alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from drafters.ngram import NgramDrafter
from engine.batch import DraftBlock, Verdict, VerificationBatch
from engine.drafter import Drafter, DraftRequest

_LOOKUP, _MODEL = 0, 1
_DECAY = 0.8  # of what earlier rounds count
_PRIOR = 4.0  # tokens that the running mean of all sequences counts for a new one
_MOST_SEQUENCES = 4096


@dataclass
class _Record:
    """Accepted and tried tokens, fading; a token behind the first rejection was never tried."""

    accepted: float = 0.0
    tried: float = 0.0

    def fade(self, decay: float) -> None:
        self.accepted *= decay
        self.tried *= decay

    def add(self, accepted: int, verified: int) -> None:
        self.accepted += accepted
        self.tried += min(accepted + 1, verified)

    def chance(self, prior: float) -> float:
        """Conditional acceptance of a token, leaning on `prior` where little is known."""
        return (self.accepted + _PRIOR * prior) / (self.tried + _PRIOR)


@dataclass
class _History:
    records: tuple[_Record, _Record] = field(default_factory=lambda: (_Record(), _Record()))
    source: int = _MODEL  # of the block that is verified next


class ModelDrafter(Drafter, Protocol):
    """One that drafts `gamma` tokens at most."""

    gamma: int


class HybridDrafter:
    """`model` drafts unless `lookup` promises more."""

    name = "hybrid"

    def __init__(self, lookup: NgramDrafter, model: ModelDrafter) -> None:
        self.lookup, self.model = lookup, model
        self.gamma = model.gamma
        self.feature_layers = model.feature_layers
        self.identity = model.identity
        self._histories: OrderedDict[int, _History] = OrderedDict()
        self._all = (_Record(2.0, 4.0), _Record(2.0, 4.0))

    def observe(
        self, batch: VerificationBatch, features: torch.Tensor | None, verdicts: Sequence[Verdict]
    ) -> None:
        self.model.observe(batch, features, verdicts)
        for item, verdict in zip(batch.items, verdicts, strict=True):
            history = self._histories.get(item.sequence)
            if item.verify and history is not None:
                for record in history.records:  # both: what was not tried for long is worth another try
                    record.fade(_DECAY)
                history.records[history.source].add(verdict.accepted, item.verify)
                self._all[history.source].fade(0.999)
                self._all[history.source].add(verdict.accepted, item.verify)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftBlock | None]:
        blocks = self.lookup.draft(requests)
        ask: list[int] = []
        for index, request in enumerate(requests):
            history = self._history(request.sequence)
            found, block = self._expected(history, _LOOKUP), blocks[index]
            use_lookup = block is not None and gain(found, len(block)) >= gain(
                self._expected(history, _MODEL), min(request.slots, self.model.gamma)
            )
            history.source = _LOOKUP if use_lookup else _MODEL
            if not use_lookup:
                ask.append(index)
        if ask:
            for index, block in zip(ask, self.model.draft([requests[i] for i in ask]), strict=True):
                blocks[index] = block
        return blocks

    def _expected(self, history: _History, source: int) -> float:
        everyone = self._all[source]
        return history.records[source].chance(everyone.accepted / everyone.tried)

    def _history(self, sequence: int) -> _History:
        history = self._histories.pop(sequence, None) or _History()
        self._histories[sequence] = history
        if len(self._histories) > _MOST_SEQUENCES:
            self._histories.popitem(last=False)
        return history


def gain(chance: float, length: int) -> float:
    """Expected accepted drafts of a block, each accepted with this chance: the sum of its powers."""
    return sum(chance**k for k in range(1, length + 1))
