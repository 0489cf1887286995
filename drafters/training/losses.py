"""What a block is trained for.

0.1 cross entropy + 0.9 full L1 + 1.0 confidence (paper section 3.3, eq. 9 to 12). The position weight is
exp(-j / 4), as the code has it; the paper writes the block size where the 4 stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

CE_WEIGHT, L1_WEIGHT, CONFIDENCE_WEIGHT = 0.1, 0.9, 1.0
DECAY = 4.0


@dataclass(frozen=True)
class BlockTargets:
    """What the slots of A blocks should say; all [A, n] but for `logits`.

    `logits` [A, n, V'] are the target's over the draft vocabulary, `lse` its log-sum-exp over the whole one.
    `labels` index the draft vocabulary, -1 for a token outside it. `mask` is False past a text's end.
    """

    logits: torch.Tensor
    lse: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class Losses:
    """Weighted means; `overlap` [A, n] is c* = 1 - L1 / 2.

    The chance that the slot's draft is accepted at T = 1.
    """

    total: torch.Tensor
    cross_entropy: torch.Tensor
    l1: torch.Tensor
    confidence: torch.Tensor
    overlap: torch.Tensor


def position_weights(count: int, device: torch.device | None = None) -> torch.Tensor:
    """[n]: exp(-j / 4)."""
    return torch.exp(-torch.arange(count, device=device) / DECAY)


def total_weight(mask: torch.Tensor) -> torch.Tensor:
    """What the losses of a batch are divided by; mask [A, n]."""
    return (position_weights(mask.shape[1], mask.device) * mask).sum()


class _Distances(torch.autograd.Function):
    """L1 distance and cross entropy [A, n] from logits [A, n, V'], with as few passes over V' as it takes.

    With q the draft's probabilities and s = sign(q - p), dL1/dlogits = q (s - E_q[s]).
    """

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: BlockTargets) -> tuple[torch.Tensor, torch.Tensor]:
        p = targets.logits.float().sub(targets.lse[..., None]).exp_()
        q = logits.float().softmax(-1)
        # Mass that the target puts outside the draft vocabulary is out of reach.
        outside = (1.0 - p.sum(-1)).clamp_min_(0.0)
        known, at = targets.labels >= 0, targets.labels.clamp_min(0)[..., None]
        chosen = logits.gather(-1, at)[..., 0].float() - logits.float().logsumexp(-1)
        signs = torch.sub(q, p, out=p)
        l1 = torch.linalg.vector_norm(signs, ord=1, dim=-1) + outside
        ctx.save_for_backward(q, signs.sgn_(), at, known)
        return l1, -chosen * known

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        q, signs, at, known = ctx.saved_tensors
        l1, ce = gradients[0][..., None], (gradients[1] * known)[..., None]
        mean = (q[..., None, :] @ signs[..., None])[..., 0]
        out = (signs * l1).add_(ce - l1 * mean).mul_(q)
        return out.scatter_add_(-1, at, -ce), None


def block_losses(
    logits: torch.Tensor,
    confidence: torch.Tensor | None,
    targets: BlockTargets,
    weight: torch.Tensor | None = None,
) -> Losses:
    """logits [A, n, V'] and confidence logits [A, n] of the draft.

    `weight` is `total_weight` of all processes that share a step (None: this one is alone); their losses add
    up to those of one batch.
    """
    l1, ce = _Distances.apply(logits, targets)  # type: ignore[no-untyped-call]
    overlap = (1.0 - 0.5 * l1).detach().clamp(0.0, 1.0)
    weights = position_weights(logits.shape[1], logits.device) * targets.mask
    norm = (weights.sum() if weight is None else weight).clamp_min(1e-6)

    def mean(loss: torch.Tensor) -> torch.Tensor:
        return (loss * weights).sum() / norm

    if confidence is None:
        bce = logits.new_zeros(())
    else:
        bce = mean(
            torch.nn.functional.binary_cross_entropy_with_logits(
                confidence.float(), overlap, reduction="none"
            )
        )
    parts = mean(ce), mean(l1), bce
    total = CE_WEIGHT * parts[0] + L1_WEIGHT * parts[1] + CONFIDENCE_WEIGHT * parts[2]
    return Losses(total, *parts, overlap)


def expected_length(chances: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """tau with bonus of each block [A] from conditional chances [A, n]: 1 + sum_k prod_{i <= k} c_i."""
    return 1.0 + (chances * mask).cumprod(-1).sum(-1)
