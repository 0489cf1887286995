"""From logits to each row's own target distribution.

The order is: bias, forbidden tokens, minimum length, penalties, grammar, temperature, min-p, top-k, top-p.
Every step looks at one row only, so the distribution of a row never depends on its batch. Ties go to low ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.native import rows as native
from engine.params import SamplingParams

if TYPE_CHECKING:  # its library is not there on every machine that trains
    from engine.grammar import GrammarState

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
        grammar: GrammarState | None = None,
    ) -> None:
        self.params = params
        self.grammar = grammar
        self.vocab_size = vocab_size
        self.choice = choice
        self.stream = stream
        self.generated = 0
        #: tokens that end the text: end-of-sequence unless ignored, and the request's own
        self.stop_ids = stop_ids
        restricted = params.allowed_token_ids is not None or bool(params.bad_words)
        #: True if logits must be changed before the softmax
        self.adjusts = (
            params.penalised
            or bool(params.logit_bias)
            or params.min_tokens > 0
            or restricted
            or grammar is not None
        )
        self._forbidden = _forbidden(params, vocab_size) if restricted else None
        self._phrases = [word for word in params.bad_words if len(word) > 1]
        self._reach = max((len(word) - 1 for word in self._phrases), default=0)
        self._tail: tuple[int, ...] = ()  # of the output, as far as bad words reach back
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
        if self._reach:
            self._tail = (*self._tail, token)[-self._reach :]
        if self._counts.numel():
            self._counts[token] += 1
        if self._seen.numel():
            self._seen[token] = True
        if self.grammar is not None:
            self.grammar.advance(token)

    def sibling(
        self, choice: int, stream: tuple[int, int, int, int], grammar: GrammarState | None
    ) -> SamplingState:
        """The state of another choice of the same request, before any token; masks and biases are shared."""
        assert not self.generated
        twin = object.__new__(SamplingState)
        twin.__dict__.update(self.__dict__)
        twin.choice, twin.stream, twin.grammar = choice, stream, grammar
        twin._counts, twin._seen = self._counts.clone(), self._seen.clone()
        return twin

    def fork(self, device: torch.device | str = "cpu") -> SamplingState:
        """A copy that may run ahead over drafts while this one stays where it is; adjusts rows there."""
        twin = object.__new__(SamplingState)
        twin.__dict__.update(self.__dict__)
        twin._counts, twin._seen = (own.to(device, copy=True) for own in (self._counts, self._seen))
        twin._bias = (self._bias[0].to(device), self._bias[1].to(device))
        if self.grammar is not None:
            twin.grammar = self.grammar.fork()
        return twin

    @property
    def ended(self) -> bool:
        """Whether the grammar's text is complete, so that nothing may follow."""
        return self.grammar is not None and self.grammar.ended

    def adjust(self, logits: torch.Tensor) -> None:
        """Apply bias, forbidden tokens, minimum length, penalties and grammar to one row [V], in place."""
        params, library = self.params, native.kernels_for(logits)
        if params.logit_bias:
            logits[self._bias[0]] += self._bias[1].to(logits.dtype)
        if self._forbidden is not None:
            logits[self._forbidden] = -torch.inf
        for phrase in self._phrases:
            if self._tail[1 - len(phrase) :] == phrase[:-1]:
                logits[phrase[-1]] = -torch.inf
        if self.generated < params.min_tokens and self._stop_list:
            logits[self._stop_list] = -torch.inf
        if params.repetition_penalty != 1.0:
            if library is not None:
                native.repeat(library, logits, self._seen, params.repetition_penalty)
            else:
                penalty = params.repetition_penalty
                less = torch.where(logits > 0, logits / penalty, logits * penalty)
                logits.copy_(torch.where(self._seen, less, logits))
        if params.presence_penalty or params.frequency_penalty:
            frequency, presence = params.frequency_penalty, params.presence_penalty
            if library is not None:
                native.penalise(library, logits, self._counts, frequency, presence)
            else:
                logits -= frequency * self._counts + presence * (self._counts > 0)
        if self.grammar is not None:
            if library is not None:
                native.allow(library, logits, self.grammar.allowed())
            else:
                logits.masked_fill_(self.grammar.forbidden().to(logits.device), -torch.inf)


def _forbidden(params: SamplingParams, vocab_size: int) -> torch.Tensor:
    """[V] of the tokens that may never come: not allowed, or a bad word by themselves."""
    allowed = params.allowed_token_ids
    mask = torch.full((vocab_size,), allowed is not None)
    if allowed is not None:
        mask[torch.tensor(allowed)] = False
    alone = [word[0] for word in params.bad_words if len(word) == 1]
    mask[torch.tensor(alone, dtype=torch.int64)] = True
    return mask


def probabilities(
    logits: torch.Tensor, params: Sequence[SamplingParams], rows: Sequence[int] | None = None
) -> torch.Tensor:
    """Processed distributions of chosen rows (default: all): temperature, then filters.

    logits [., V] adjusted -> p [n, V]; params [n]. Greedy rows have no distribution here; the caller takes
    their argmax. p sums to 1 over the tokens kept and is exactly 0 elsewhere.
    """
    rows = range(len(params)) if rows is None else rows
    heat = [p.temperature or 1.0 for p in params]
    library = native.kernels_for(logits)
    if library is not None:
        p = native.softmax(library, logits, rows, heat)
    else:
        chosen = logits[torch.tensor(rows, device=logits.device)]
        p = torch.softmax(chosen / torch.tensor(heat, dtype=logits.dtype, device=logits.device)[:, None], -1)
    filtered = [i for i, q in enumerate(params) if q.top_k > 0 or q.top_p < 1.0 or q.min_p > 0.0]
    if filtered:
        whole = len(filtered) == len(params)
        cut = _filter(p if whole else p[filtered], [params[i] for i in filtered])
        if whole:
            return cut
        p[filtered] = cut
    return p


def _filter(p: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Filter each row [n, V], perhaps in place."""
    library = native.kernels_for(p)
    if library is None:
        return _torch_filter(p, params)
    native.filter_rows(
        library,
        p,
        [max(q.top_k, 0) for q in params],
        [q.top_p for q in params],
        [q.min_p for q in params],
    )
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
