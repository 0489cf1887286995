"""Log probabilities of a prompt's own tokens, from the rows before them."""

from __future__ import annotations

import torch

from engine.batch import BatchItem
from engine.outputs import TokenLogprob

#: rows at a time: a vocabulary of log probabilities for each of them is held beside the logits
_TOGETHER = 16


def score(item: BatchItem, logits: torch.Tensor) -> tuple[TokenLogprob, ...] | None:
    """What the model says of the tokens that follow the item's scored rows. logits [scored, V].

    None if a row is not finite.
    """
    if not item.scored:
        return ()
    end = item.start + item.count - item.sample  # behind the last row that is scored
    targets = torch.from_numpy(item.history[end - item.scored + 1 : end + 1]).to(logits.device).long()
    top = item.state.params.prompt_logprobs or 0
    scores: list[TokenLogprob] = []
    for first in range(0, item.scored, _TOGETHER):
        rows, tokens = logits[first : first + _TOGETHER], targets[first : first + _TOGETHER]
        if not bool(rows.amax(-1).isfinite().all()):
            return None
        logp = torch.log_softmax(rows, -1)
        own = logp.gather(1, tokens[:, None])
        ranks = 1 + (logp > own).sum(-1)
        best = torch.topk(logp, top)
        for token, value, rank, ids, values in zip(
            tokens.tolist(), own[:, 0].tolist(), ranks.tolist(), best.indices.tolist(), best.values.tolist(),
            strict=True,
        ):  # fmt: skip
            scores.append(TokenLogprob(token, value, tuple(zip(ids, values, strict=True)), rank))
    return tuple(scores)
