"""What the model itself says of tokens: log probabilities, ranks, the likeliest alternatives.

The kernels report rows of fp32 on the CPU, torch everything else; the two are tested against each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.native import rows as native
from engine.outputs import TokenLogprob

#: rows at a time in torch: a vocabulary of log probabilities for each of them is held beside the logits
_TOGETHER = 16


def logprobs(
    rows: Sequence[torch.Tensor], tokens: Sequence[int], tops: Sequence[int], ranked: bool = False
) -> list[TokenLogprob]:
    """Of each row of logits [V]: its token, with so many of the likeliest beside it (at most V).

    `ranked` adds the token's rank. A row whose largest value is not finite must not be asked about.
    """
    if not rows:
        return []
    library = native.kernels_for(rows[0])
    if library is not None:
        return native.logprobs(library, rows, tokens, tops, ranked)
    out: list[TokenLogprob] = []
    for first in range(0, len(rows), _TOGETHER):
        part = slice(first, first + _TOGETHER)
        out += _logprobs(torch.stack(list(rows[part])), tokens[part], tops[part], ranked)
    return out


def _logprobs(
    rows: torch.Tensor, tokens: Sequence[int], tops: Sequence[int], ranked: bool
) -> list[TokenLogprob]:
    logp = torch.log_softmax(rows, -1)
    own = logp.gather(1, torch.tensor(tokens, device=rows.device)[:, None])
    ranks: list[int | None] = (1 + (logp > own).sum(-1)).tolist() if ranked else [None] * len(tokens)
    best = torch.topk(logp, max(tops))
    ids, values = best.indices.tolist(), best.values.tolist()
    return [
        TokenLogprob(token, value, tuple(zip(ids[i][:top], values[i][:top], strict=True)), ranks[i])
        for i, (token, value, top) in enumerate(zip(tokens, own[:, 0].tolist(), tops, strict=True))
    ]
