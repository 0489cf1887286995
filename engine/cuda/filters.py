"""Processed distributions of many rows at once, on the device: `engine.sampling.probabilities` in one go.

Nothing here waits for the device or depends on values, so it may be part of a graph. Where that one looks at
a few of the largest probabilities first, this one sorts: a sort costs less than to ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.cuda.staging import Array
from engine.draws import HOPELESS
from engine.noise import gumbels
from engine.params import SamplingParams

_TOGETHER = 128  # rows: bounds the memory for what is between


@dataclass(frozen=True, slots=True)
class Filters:
    """Of n rows: temperature and min_p in the logits' type, top_k (0: off) int64, top_p float64.

    `most` is the largest top_k if all rows have one, else None: how far a row must be sorted.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    most: int | None = None

    @staticmethod
    def arrays(params: Sequence[SamplingParams]) -> list[Array]:
        """Temperature, top_k, top_p and min_p as they are sent; greedy rows have a temperature of 1."""
        return [
            np.array([p.temperature or 1.0 for p in params], dtype=np.float64),
            np.array([max(p.top_k, 0) for p in params], dtype=np.int64),
            np.array([p.top_p for p in params], dtype=np.float64),
            np.array([p.min_p for p in params], dtype=np.float64),
        ]

    def part(self, rows: slice) -> Filters:
        return Filters(
            self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows], self.most
        )


def filtered(params: SamplingParams) -> bool:
    """Whether more than the temperature changes the distribution."""
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0


def softmax(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """softmax(logits / temperature [n]) -> [n, V]"""
    return torch.softmax(logits / temperature.to(logits.dtype)[:, None], -1)


def cut(p: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Min-p, top-k and top-p on each row [n, V], normalised. Ties go to the lowest ids."""
    parts = [
        _cut(p[first : first + _TOGETHER], filters.part(slice(first, first + _TOGETHER)))
        for first in range(0, len(p), _TOGETHER)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _cut(p: torch.Tensor, filters: Filters) -> torch.Tensor:
    vocab = p.shape[-1]
    if filters.most is not None and filters.most < vocab:
        top = torch.topk(p, filters.most).values
    else:
        top = torch.sort(p, descending=True).values
    has_floor, has_k = filters.min_p > 0.0, filters.top_k > 0
    above_floor = (top >= filters.min_p.to(p.dtype)[:, None] * top[:, :1]).sum(-1)
    count = torch.where(has_floor, above_floor, vocab)
    count = torch.where(has_k, torch.minimum(count, filters.top_k), count).clamp_max(top.shape[-1])
    cumulative = top.cumsum(-1, dtype=torch.float64)
    mass = cumulative.gather(1, (count - 1).clamp_min(0)[:, None])[:, 0]
    mass = torch.where(has_floor | has_k, mass, 1.0)
    nucleus = (cumulative - top < (filters.top_p * mass)[:, None]).sum(-1).clamp_min(1)
    count = torch.where(filters.top_p < 1.0, torch.minimum(count, nucleus), count)
    threshold = top.gather(1, (count - 1).clamp_min(0)[:, None])
    ties = count - (top > threshold).sum(-1)
    equal = p == threshold
    kept = (p > threshold) | (equal & (equal.cumsum(-1, dtype=torch.int32) <= ties[:, None]))
    rest = torch.where(kept, p, 0.0)
    return rest / rest.sum(-1, keepdim=True)


def coupled_argmax(p: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """argmax(log p + G) of each row [n, V] under its key [n, 2] int32, ties to the lowest id."""
    tokens = torch.arange(p.shape[-1], dtype=torch.int32, device=p.device)
    picked = []
    for first in range(0, len(p), _TOGETHER):
        some, key = p[first : first + _TOGETHER], keys[first : first + _TOGETHER]
        score = some.to(torch.float32).log() + gumbels(key, tokens)
        hopeless = some <= HOPELESS * some.amax(-1, keepdim=True)
        picked.append(score.masked_fill_(hopeless, -torch.inf).argmax(-1))
    return torch.cat(picked)
