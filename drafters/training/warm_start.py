"""Where a fresh draft model begins: features of one size, and a Markov head that knows the answers' bigrams.

Like `drafters.training.target_start`, both only choose a starting point inside the same model. Feature
dimensions differ in size by a factor of a thousand, and Adam moves every weight alike: so `fc` is trained
over features divided by their size, and the checkpoint folds the division in. Bigrams are most of what early
training finds out, and can be counted.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from drafters.heads import MarkovHead
from drafters.training.corpus import Corpus
from drafters.training.features import FeatureSource

_TEXTS = 100
_LINEAR = 0.5  # tanh of anything smaller is nearly itself


def feature_scale(source: FeatureSource, texts: npt.NDArray[np.int64]) -> torch.Tensor:
    """Root mean square of each feature [m * d], from some texts; 1 while no features are there."""
    ready = source.ready(texts)[:_TEXTS]
    if not len(ready):
        return torch.ones(())
    sums, count = torch.zeros(()), 0
    for index in ready:
        # A text's first token is an attention sink, a hundred times as large as any other.
        layers = source.texts(np.array([index])).layers[1:]
        sums, count = sums.to(layers.device) + layers.pow(2).sum(0), count + len(layers)
    return (sums / count).sqrt().clamp_min(1e-3)


def bigram_factors(
    corpus: Corpus, texts: npt.NDArray[np.int64], vocab: int, d2t: torch.Tensor | None, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """[V, r] and [V', r] whose product is nearly log p(next | previous) / p(next) of the answers.

    Positive values only, shrunk where pairs are rare; the best such factors in the least-squares sense.
    """
    if d2t is None:
        d2t = torch.arange(vocab)
    t2d = torch.full((vocab,), -1)
    t2d[d2t] = torch.arange(len(d2t))
    parts = [(corpus.text(i), int(corpus.prompts[i])) for i in texts.tolist()]
    before = np.concatenate([text[prompt - 1 : -1] for text, prompt in parts])
    after = t2d[torch.from_numpy(np.concatenate([text[prompt:] for text, prompt in parts])).long()]
    pairs = torch.stack((torch.from_numpy(before).long(), after))[:, after >= 0]
    shape = (vocab, len(d2t))
    with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
        counts = torch.sparse_coo_tensor(pairs, torch.ones(pairs.shape[1]), shape).coalesce()
        (row, column), count = counts.indices(), counts.values()
        of_row = torch.zeros(vocab).index_add_(0, row, count)
        of_column = torch.zeros(len(d2t)).index_add_(0, column, count)
        information = (count * count.sum() / (of_row[row] * of_column[column])).log().clamp_min(0.0)
        weighted = torch.sparse_coo_tensor(counts.indices(), information * count / (count + 1.0), shape)
        u, s, v = torch.svd_lowrank(weighted.coalesce(), q=rank, niter=3)
    return u * s.sqrt(), v * s.sqrt()


@torch.no_grad()
def teach_bigrams(head: MarkovHead, previous: torch.Tensor, following: torch.Tensor) -> None:
    """Let a fresh head of any kind add previous [V, r] x following [V', r] to the logits."""
    size = torch.ones(head.rank)
    if head.kind == "gated":
        following = 2.0 * following  # its gates begin half open
    elif head.kind == "rnn":
        # No smaller than it must be: W2 makes up for it, and would make noise of everything else as well.
        size = (_LINEAR / previous.abs().amax(0).cpu()).clamp_max(1.0)
        rank = head.rank
        out = head.joint_proj.weight[2 * rank :]
        out.zero_()
        out[:, rank : 2 * rank] = torch.eye(rank)
        head.joint_proj.bias[2 * rank :].zero_()
    size = size.to(previous.device)
    head.markov_w1.weight.copy_(previous * size)
    head.markov_w2.weight.copy_(following / size)
