"""What a drafter's rounds tell.

Accepted length, conditional acceptance by position, reliability of confidence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import DraftBlock, Verdict, VerificationBatch
from engine.drafter import Drafter, DraftRequest

_BINS = 20


@dataclass(frozen=True, slots=True)
class Round:
    """One verified block: how many drafts were verified and accepted, tokens emitted.

    Raw confidence logits.
    """

    verified: int
    accepted: int
    emitted: int
    confidence: tuple[float, ...] | None = None


class Recorder:
    """A drafter that keeps what became of another's blocks. Give the engine this one."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.name, self.identity = drafter.name, drafter.identity
        self.feature_layers = drafter.feature_layers
        self.rounds: list[Round] = []

    def observe(
        self, batch: VerificationBatch, features: torch.Tensor | None, verdicts: Sequence[Verdict]
    ) -> None:
        for item, verdict in zip(batch.items, verdicts, strict=True):
            if item.sample and item.count - item.verify == 1 and verdict.finish != "error":
                confidence = item.draft.confidence if item.draft is not None else None
                self.rounds.append(Round(item.verify, verdict.accepted, len(verdict.tokens), confidence))
        self.drafter.observe(batch, features, verdicts)

    def draft(self, requests: Sequence[DraftRequest]) -> list[DraftBlock | None]:
        return self.drafter.draft(requests)


@dataclass(frozen=True)
class Reliability:
    """Of the predicted survival at one position.

    Expected calibration error, area under the ROC curve, the diagram. `bins` are (mean predicted survival,
    share that survived, blocks) of those bins that hold any.
    """

    ece: float
    auc: float
    bins: list[tuple[float, float, int]] = field(default_factory=list)


def accepted_length(rounds: Sequence[Round]) -> float:
    """tau: tokens a round, bonus included; a round that ends at a stop token counts what it emitted."""
    return float(np.mean([each.emitted for each in rounds])) if rounds else float("nan")


def conditional_acceptance(rounds: Sequence[Round]) -> list[float]:
    """Per position k: accepted drafts among those whose predecessors were all accepted."""
    longest = max((each.verified for each in rounds), default=0)
    out = []
    for k in range(1, longest + 1):
        tried = [each for each in rounds if each.verified >= k and each.accepted >= k - 1]
        out.append(sum(each.accepted >= k for each in tried) / len(tried) if tried else float("nan"))
    return out


def reliability(rounds: Sequence[Round]) -> list[Reliability]:
    """Per position, from blocks verified in full; the label is that drafts 1 .. k were all accepted."""
    whole = [each for each in rounds if each.confidence and each.verified == len(each.confidence)]
    if not whole:
        return []
    size = max(each.verified for each in whole)
    whole = [each for each in whole if each.verified == size]
    logits = np.array([each.confidence for each in whole], dtype=np.float64)
    survival = np.cumprod(1.0 / (1.0 + np.exp(-logits)), axis=1, dtype=np.float64)
    accepted = np.array([each.accepted for each in whole])
    return [_reliability(survival[:, k], accepted > k) for k in range(size)]


def _reliability(predicted: npt.NDArray[np.floating[Any]], survived: npt.NDArray[np.bool_]) -> Reliability:
    place = np.minimum((predicted * _BINS).astype(int), _BINS - 1)
    bins, error = [], 0.0
    for b in range(_BINS):
        inside = place == b
        if inside.any():
            mean, share = float(predicted[inside].mean()), float(survived[inside].mean())
            bins.append((mean, share, int(inside.sum())))
            error += inside.mean() * abs(mean - share)
    return Reliability(float(error), area_under_curve(predicted, survived), bins)


def area_under_curve(scores: npt.NDArray[np.floating[Any]], labels: npt.NDArray[np.bool_]) -> float:
    """Chance that a survivor scores higher than another block, ties counting half.

    NaN where all are alike.
    """
    positive, negative = int(labels.sum()), int((~labels).sum())
    if not positive or not negative:
        return float("nan")
    _, inverse, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2.0)[inverse]
    return float((ranks[labels].sum() - positive * (positive + 1) / 2.0) / (positive * negative))
