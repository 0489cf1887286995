"""Log probabilities of a prompt's own tokens, from the rows before them."""

from __future__ import annotations

import torch

from engine.batch import BatchItem
from engine.logprobs import logprobs
from engine.outputs import TokenLogprob


def score(item: BatchItem, logits: torch.Tensor) -> tuple[TokenLogprob, ...] | None:
    """What the model says of the tokens that follow the item's scored rows. logits [scored, V].

    None if a row is not finite.
    """
    if not item.scored:
        return ()
    end = item.start + item.count - item.sample  # behind the last row that is scored
    if not bool(logits.amax(-1).isfinite().all()):
        return None
    tokens = item.history[end - item.scored + 1 : end + 1].tolist()
    tops = [item.state.params.prompt_logprobs or 0] * item.scored
    return tuple(logprobs(logits.unbind(0), tokens, tops, ranked=True))
