"""Draws from a row's distribution: inverse CDF, what a rejected draft leaves, and coupled argmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.native import rows as native
from engine.noise import gumbels

# Coupled noise lies in [-2.82, 22.88] (engine/noise.py): a token whose probability is below this fraction
# of the likeliest token's can never win, so its noise need not be computed.
HOPELESS = 5e-12


@dataclass(frozen=True, slots=True)
class Rejected:
    """A draft that was turned down, and its law [V]; None if that was one-hot."""

    token: int
    law: torch.Tensor | None = None


def draw(
    p: torch.Tensor,
    u: torch.Tensor,
    rows: Sequence[int] | None = None,
    rejected: Sequence[Rejected | None] | None = None,
) -> torch.Tensor:
    """Inverse-CDF draw from chosen rows (default: all) of non-negative weights [., V], u [n] in [0, 1).

    Where a draft was rejected, from max(p - q, 0) instead, q being its law; if rounding left nothing of
    that, p equals q and is right itself. Weights may have any positive sum; sums are in double precision.
    A token of weight 0 is never drawn. Returns [n] int64.
    """
    rows = range(len(u)) if rows is None else rows
    rejected = [None] * len(rows) if rejected is None else rejected
    left = [_residual(p[row], cause) for row, cause in zip(rows, rejected, strict=True)]
    return inverse_cdf(torch.stack(left), u)


def _residual(p: torch.Tensor, rejected: Rejected | None) -> torch.Tensor:
    """What to draw from [V], after a rejection or none."""
    if rejected is None:
        return p
    rest = p.clone()
    if rejected.law is None:
        rest[rejected.token] = 0.0
    else:
        rest = (rest - rejected.law).clamp_min_(0.0)
    return rest if float(rest.sum()) > 0.0 else p


def inverse_cdf(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Draws from non-negative weights [n, V] by u [n] -> [n] int64; without a positive sum, any token.

    In two levels: a cumulative sum over blocks picks the block, one inside it the token.
    """
    n, vocab = weights.shape
    width = 256
    if vocab % width:
        weights = torch.nn.functional.pad(weights, (0, width - vocab % width))
    blocks = weights.view(n, -1, width)
    rows = torch.arange(n, device=weights.device)
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    block, rest = _locate(sums, u.to(torch.float64) * sums[:, -1])
    inside = blocks[rows, block].to(torch.float64).cumsum(-1)
    token, _ = _locate(inside, rest)
    return (block * width + token).clamp_max(vocab - 1)


def _locate(cdf: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First index whose cumulative sum exceeds target [n], and how far into it the target lies."""
    total = cdf[:, -1]
    # Strictly below the total, whatever rounding did, so that an index with positive weight exists.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))[:, None]
    index = torch.searchsorted(cdf, target, right=True).clamp_max(cdf.shape[-1] - 1)  # NaN has no place
    before = torch.where(index > 0, cdf.gather(1, (index - 1).clamp_min(0)), 0.0)
    return index[:, 0], (target - before)[:, 0]


def coupled_argmax(p: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """argmax(log p + G) of each row, ties to the lowest id (spec: coupled sampling).

    p [n, V] probabilities, keys [n, 2] from `row_keys`. Returns [n] int64. The kernels' logarithms equal
    torch's to the last bit or so, the uniforms exactly.
    """
    library = native.kernels_for(p)
    if library is None:
        return _coupled_argmax(p, keys)
    words = [(a & 0xFFFFFFFF, b & 0xFFFFFFFF) for a, b in keys.tolist()]
    return torch.tensor(native.coupled_argmax(library, p, words))


def _coupled_argmax(p: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The same in torch: row by row, so that the work stays in the cache, over the tokens that can win."""
    picked = []
    for row, key in zip(p, keys, strict=True):
        support = (row > HOPELESS * row.max()).nonzero()[:, 0]
        score = row[support].to(torch.float32).log_() + gumbels(key[None], support.to(torch.int32))[0]
        picked.append(support[score.argmax()])
    return torch.stack(picked)
