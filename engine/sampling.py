"""From logits to each row's own target distribution, and draws from it.

The order is: bias, minimum length, penalties, temperature, min-p, top-k, top-p. Every step looks at one
row only, so the distribution of a row never depends on its batch. Ties are broken towards low ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.native.loader import native_library
from engine.noise import gumbels
from engine.params import SamplingParams

# Coupled noise lies in [-2.82, 22.88] (engine/noise.py): a token whose probability is below this fraction
# of the likeliest token's can never win, so its noise need not be computed.
_HOPELESS = 5e-12
_FIRST_CANDIDATES = 64


class SamplingState:
    """What one sequence's logits depend on beside the model: parameters, and the tokens so far.

    Belongs to the sequence; only the worker touches it between latch and commit. `generated` counts
    output tokens, and `advance` must be called once for each of them, in order.
    """

    def __init__(
        self,
        params: SamplingParams,
        vocab_size: int,
        stop_ids: frozenset[int],
        prompt: Sequence[int] = (),
        choice: int = 0,
        stream: tuple[int, int, int, int] = (0, 0, 0, 0),
    ) -> None:
        self.params = params
        self.choice = choice
        self.stream = stream
        self.generated = 0
        #: tokens that end the text: end-of-sequence unless ignored, and the request's own
        self.stop_ids = stop_ids
        #: True if logits must be changed before the softmax
        self.adjusts = params.penalised or bool(params.logit_bias) or params.min_tokens > 0
        self._stop_list = sorted(stop_ids)
        self._bias = (
            torch.tensor(list(params.logit_bias.keys()), dtype=torch.int64),
            torch.tensor(list(params.logit_bias.values()), dtype=torch.float32),
        )
        self._counts = torch.zeros(vocab_size if params.penalised else 0, dtype=torch.int32)
        self._seen = torch.zeros(vocab_size if params.repetition_penalty != 1.0 else 0, dtype=torch.bool)
        if self._seen.numel() and len(prompt):
            self._seen[torch.as_tensor(prompt, dtype=torch.int64)] = True

    def advance(self, token: int) -> None:
        """The text grew by `token`."""
        self.generated += 1
        if self._counts.numel():
            self._counts[token] += 1
        if self._seen.numel():
            self._seen[token] = True

    def fork(self) -> SamplingState:
        """A copy that may run ahead over drafts while this one stays where it is."""
        twin = object.__new__(SamplingState)
        twin.__dict__.update(self.__dict__)
        twin._counts, twin._seen = self._counts.clone(), self._seen.clone()
        return twin

    def adjust(self, logits: torch.Tensor) -> None:
        """Apply bias, minimum length and penalties to one row [V], in place."""
        params = self.params
        if params.logit_bias:
            logits[self._bias[0]] += self._bias[1].to(logits.dtype)
        if self.generated < params.min_tokens and self._stop_list:
            logits[self._stop_list] = -torch.inf
        if params.repetition_penalty != 1.0:
            seen = logits[self._seen]
            logits[self._seen] = torch.where(
                seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty
            )
        if params.presence_penalty or params.frequency_penalty:
            counts = self._counts
            logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)


def probabilities(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Processed distribution of each row: temperature, then filters. logits [n, V] adjusted -> p [n, V].

    Greedy rows have no distribution here; the caller takes their argmax. p sums to 1 over the tokens kept
    and is exactly 0 elsewhere.
    """
    temperature = torch.tensor(
        [p.temperature or 1.0 for p in params], dtype=logits.dtype, device=logits.device
    )
    p = torch.softmax(logits / temperature[:, None], dim=-1)
    filtered = [i for i, q in enumerate(params) if q.top_k > 0 or q.top_p < 1.0 or q.min_p > 0.0]
    if filtered:
        whole = len(filtered) == len(params)
        rows = p if whole else p[filtered]
        rows = _filter(rows, [params[i] for i in filtered])
        if whole:
            return rows
        p[filtered] = rows
    return p


def _filter(p: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Filter each row [n, V]: in the native library for fp32 on the CPU, else in torch."""
    native = native_library()
    if native is None or p.dtype != torch.float32 or p.device.type != "cpu":
        return _torch_filter(p, params)
    p = p.contiguous()
    top_k = torch.tensor([max(q.top_k, 0) for q in params], dtype=torch.int32)
    top_p = torch.tensor([q.top_p for q in params], dtype=torch.float64)
    min_p = torch.tensor([q.min_p for q in params], dtype=torch.float64)
    native.dspark_filter(p.data_ptr(), *p.shape, top_k.data_ptr(), top_p.data_ptr(), min_p.data_ptr())
    return p


def _torch_filter(p: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Min-p, top-k and top-p as cut-offs on each row: keep what lies above, and the first ties at it.

    All three keep a prefix of the row sorted by probability, so the row is never sorted whole unless the
    nucleus is that wide: a few largest values decide, with more taken until every row is decided.
    """
    vocab = p.shape[-1]
    k = min(vocab, max([_FIRST_CANDIDATES, *(q.top_k + 1 for q in params)]))
    pending = list(range(len(params)))
    threshold = torch.zeros(len(params), dtype=p.dtype, device=p.device)
    ties = torch.zeros(len(params), dtype=torch.int64, device=p.device)
    while pending:
        values = torch.topk(p[pending], k, dim=-1).values
        undecided = []
        for row, q, top in zip(pending, [params[i] for i in pending], values, strict=True):
            kept = _kept(p[row], top, q)
            if kept is None:
                undecided.append(row)
                continue
            threshold[row] = top[kept - 1]
            ties[row] = kept - int((top > top[kept - 1]).sum())
        pending = undecided
        k = min(vocab, k * 8)
    above = p > threshold[:, None]
    equal = p == threshold[:, None]
    if bool((equal.sum(-1) > ties).any()):  # some ties go: the lowest ids stay
        equal &= equal.cumsum(-1) <= ties[:, None]
    p = torch.where(above | equal, p, 0.0)
    # Row by row: torch adds up a single long row in another order than one of many.
    return p / torch.stack([row.sum() for row in p])[:, None]


def _kept(row: torch.Tensor, top: torch.Tensor, params: SamplingParams) -> int | None:
    """How many of the row's largest probabilities survive, or None if `top` does not reach that far.

    `top` [k] are the row's k largest values in descending order.
    """
    k, whole = top.shape[0], top.shape[0] == row.shape[0]
    count = k if whole else k + 1  # k + 1 stands for "more than we see"
    if params.min_p > 0.0:
        count = min(count, int((top >= params.min_p * top[0]).sum()))
        if count == k and not whole:
            count = k + 1
    if params.top_k > 0:
        count = min(count, params.top_k)
    if params.top_p < 1.0:
        # How to sum depends on the row's own parameters; how far `top` reaches depends on others'.
        if params.top_k > 0:
            mass = float(top[:count].sum(dtype=torch.float64))
        elif params.min_p > 0.0:
            mass = float(row[row >= params.min_p * top[0]].sum(dtype=torch.float64))
        else:
            mass = 1.0
        before = top.cumsum(0, dtype=torch.float64) - top
        nucleus = int((before < params.top_p * mass).sum())
        if nucleus == k and not whole and count > k:
            return None
        count = min(count, max(nucleus, 1))
    return count if count <= k else None


def draw(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Inverse-CDF draw from each row of non-negative weights [n, V] (any positive sum) with u [n] in [0, 1).

    In two levels and double precision: a cumulative sum over blocks picks the block, one inside it the
    token. A token of weight 0 is never drawn. Returns [n] int64.
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
    return block * width + token


def _locate(cdf: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First index whose cumulative sum exceeds target [n], and how far into it the target lies."""
    total = cdf[:, -1]
    # Strictly below the total, whatever rounding did, so that an index with positive weight exists.
    target = torch.minimum(target, torch.nextafter(total, torch.zeros_like(total)))[:, None]
    index = torch.searchsorted(cdf, target, right=True)
    before = torch.where(index > 0, cdf.gather(1, (index - 1).clamp_min(0)), 0.0)
    return index[:, 0], (target - before)[:, 0]


def coupled_argmax(p: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """argmax(log p + G) of each row, ties to the lowest id (spec: coupled sampling).

    p [n, V] probabilities, keys [n, 2] from `row_keys`. Returns [n] int64. The native library does it where
    it is there and p is fp32 on the CPU; same uniforms, logarithms equal to the last bit or so.
    """
    native = native_library()
    if native is not None and p.dtype == torch.float32 and p.device.type == "cpu":
        p, keys = p.contiguous(), keys.contiguous()
        out = torch.empty(p.shape[0], dtype=torch.int64)
        native.dspark_coupled_argmax(p.data_ptr(), *p.shape, keys.data_ptr(), out.data_ptr())
        return out
    return _coupled_argmax(p, keys)


def _coupled_argmax(p: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The same in torch: row by row, so that the work stays in the cache, over the tokens that can win."""
    picked = []
    for row, key in zip(p, keys, strict=True):
        support = (row > _HOPELESS * row.max()).nonzero()[:, 0]
        score = row[support].to(torch.float32).log_() + gumbels(key[None], support.to(torch.int32))[0]
        picked.append(support[score.argmax()])
    return torch.stack(picked)
