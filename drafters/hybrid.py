"""Two drafters as one: prompt lookup where the text repeats itself, a draft model elsewhere.

Chosen per sequence and round by what each is expected to gain, from how often its tokens were accepted in
earlier rounds. The choice is made before the draft model draws anything, so it cannot depend on the block
that it decides about; the lookup's block is a function of the text alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from drafters.ngram import NgramDrafter
from engine.batch import DraftBlock, Verdict, VerificationBatch
from engine.drafter import Drafter, DraftRequest

_DECAY = 0.8  # of what earlier rounds count
_PRIOR = 4.0  # tokens that the running mean of all sequences counts for a new one
_MOST_SEQUENCES = 4096


@dataclass
class _Record:
    """Accepted and tried tokens of the model, fading; a token behind the first rejection was never tried."""

    accepted: float = 0.0
    tried: float = 0.0

    def fade(self, decay: float) -> None:
        self.accepted *= decay
        self.tried *= decay

    def add(self, accepted: int, decided: int) -> None:
        self.accepted += accepted
        self.tried += decided

    def chance(self, prior: float) -> float:
        """Conditional acceptance of a token, leaning on `prior` where little is known."""
        return (self.accepted + _PRIOR * prior) / (self.tried + _PRIOR)


class ModelDrafter(Drafter, Protocol):
    """One that drafts `gamma` tokens at most."""

    gamma: int


class HybridDrafter:
    """`model` drafts unless `lookup` promises more, or the model may not."""

    name = "hybrid"

    def __init__(self, lookup: NgramDrafter, model: ModelDrafter) -> None:
        self.lookup, self.model = lookup, model
        self.gamma = model.gamma
        self.feature_layers = model.feature_layers
        self.identity = model.identity
        self._records: OrderedDict[int, _Record] = OrderedDict()
        self._all = _Record(2.0, 4.0)

    def observe(
        self, batch: VerificationBatch, features: torch.Tensor | None, verdicts: Sequence[Verdict]
    ) -> None:
        self.model.observe(batch, features, verdicts)
        if not any(item.verify for item in batch.items):
            return
        self.lookup.observe(batch, features, verdicts)
        for item, verdict in zip(batch.items, verdicts, strict=True):
            record = self._records.get(item.sequence)
            if not item.verify or item.draft is None or record is None:
                continue
            record.fade(_DECAY)  # also while the other one drafts: it may be worth another try
            if item.draft.chances is None:
                decided = verdict.decided(item.verify)
                record.add(verdict.accepted, decided)
                self._all.fade(0.999)
                self._all.add(verdict.accepted, decided)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftBlock | None]:
        blocks = self.lookup.draft(requests)
        ask: list[int] = []
        for index, (request, block) in enumerate(zip(requests, blocks, strict=True)):
            slots = min(request.slots, self.model.gamma)
            chance = self._record(request.sequence).chance(self._all.accepted / self._all.tried)
            if slots and (block is None or looked_up(block) < gain(chance, slots)):
                ask.append(index)
        if ask:
            for index, block in zip(ask, self.model.draft([requests[i] for i in ask]), strict=True):
                blocks[index] = block
        return blocks

    def _record(self, sequence: int) -> _Record:
        record = self._records.pop(sequence, None) or _Record()
        self._records[sequence] = record
        if len(self._records) > _MOST_SEQUENCES:
            self._records.popitem(last=False)
        return record


def gain(chance: float, length: int) -> float:
    """Expected accepted drafts of a block, each accepted with this chance: the sum of its powers."""
    return sum(chance**k for k in range(1, length + 1))


def looked_up(block: DraftBlock) -> float:
    """The same of a block whose tokens each have a chance of their own."""
    survival, expected = 1.0, 0.0
    for chance in block.chances or ():
        survival *= chance
        expected += survival
    return expected
