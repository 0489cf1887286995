"""What a block is trained for.

0.1 cross entropy + 0.9 full L1 + 1.0 confidence (paper section 3.3, eq. 9 to 12). The position weight is
exp(-j / 4), as the code has it; the paper writes the block size where the 4 stands.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    log_q = logits.float().log_softmax(-1)
    p = (targets.logits.float() - targets.lse[..., None]).exp()
    # Mass that the target puts outside the draft vocabulary is out of reach.
    l1 = (log_q.exp() - p).abs().sum(-1) + (1.0 - p.sum(-1)).clamp_min(0.0)
    overlap = (1.0 - 0.5 * l1).detach().clamp(0.0, 1.0)
    known = targets.labels >= 0
    ce = -log_q.gather(-1, targets.labels.clamp_min(0)[..., None])[..., 0] * known
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
