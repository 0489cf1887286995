"""How the token of each slot is drawn: the request's own parameters, noise and processors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.batch import DraftBlock
from engine.drafter import DraftRequest
from engine.draws import coupled_argmax, draw
from engine.noise import Purpose, host_row_keys, host_uniforms
from engine.params import SamplingParams
from engine.sampling import SamplingState, probabilities


@dataclass(slots=True)
class SlotDraw:
    """How the token of one slot is drawn: by the request's own parameters, by `u` or under `key`.

    `state` is set where the request's bias, penalties, minimum length or grammar change logits: a fork that
    all slots of the block share and that runs ahead with their tokens.
    """

    params: SamplingParams
    u: float = 0.0
    key: tuple[int, int] | None = None
    state: SamplingState | None = None


@dataclass(slots=True)
class Drawn:
    """Tokens of one block, the laws [n, V'] they were drawn from (None: one-hot), raw confidence logits."""

    tokens: list[int] = field(default_factory=list)
    laws: torch.Tensor | None = None
    confidence: list[float] | None = None

    def block(self, d2t: torch.Tensor | None) -> DraftBlock:
        """For the engine; `d2t` [V'] are the target ids of a reduced draft vocabulary."""
        confidence = None if self.confidence is None else tuple(self.confidence)
        return DraftBlock(tuple(self.tokens), self.laws, d2t, confidence)


def slot_draws(requests: Sequence[DraftRequest], counts: Sequence[int]) -> list[list[SlotDraw]]:
    """Random numbers: uniforms keyed by (anchor, round, slot), or the noise that the target will see."""
    draws: list[list[SlotDraw]] = []
    for request, count in zip(requests, counts, strict=True):
        fork = request.state.fork() if request.state.adjusts else None
        draws.append([SlotDraw(request.state.params, state=fork) for _ in range(count)])
    sampled = [i for i, request in enumerate(requests) if not request.state.params.greedy]
    free = [i for i in sampled if requests[i].state.params.seed is None]
    if free:
        uniforms = host_uniforms(
            [requests[i].state.stream for i in free],
            [requests[i].anchor for i in free],
            [requests[i].round for i in free],
            max(counts[i] for i in free),
            Purpose.DRAFT,
        )
        for i, numbers in zip(free, uniforms, strict=True):
            for how, u in zip(draws[i], numbers, strict=False):
                how.u = u
    for i in set(sampled) - set(free):
        state, count = requests[i].state, counts[i]
        places = [requests[i].anchor + 1 + k for k in range(count)]
        keys = host_row_keys([state.params.seed or 0] * count, [state.choice] * count, places)
        for how, key in zip(draws[i], keys, strict=True):
            how.key = key
    return draws


def adjust(logits: torch.Tensor, state: SamplingState, d2t: torch.Tensor | None) -> None:
    """The request's bias, penalties, minimum length and grammar on one row [V'] of draft logits, in place."""
    if d2t is None:
        state.adjust(logits)
        return
    full = logits.new_full((state.vocab_size,), -torch.inf)
    full[d2t] = logits
    state.adjust(full)
    torch.index_select(full, 0, d2t, out=logits)


def choose(
    logits: torch.Tensor, how: SlotDraw, d2t: torch.Tensor | None, vocab: int
) -> tuple[int, torch.Tensor | None]:
    """The token of one slot as a target id, and its law [V'] unless that is one-hot. logits [V'], changed.

    Coupled noise belongs to target tokens, of which there are `vocab`.
    """
    if how.state is not None:
        adjust(logits, how.state, d2t)
    if how.params.greedy:
        place, law = int(logits.argmax()), None
    else:
        p = probabilities(logits[None], [how.params])
        if not bool(logits.max().isfinite()):  # a broken row proposes the first token for certain
            p = torch.zeros_like(p)
            p[0, 0] = 1.0
        if how.key is None:
            place, law = int(draw(p, torch.tensor([how.u], dtype=torch.float64))), p[0]
        else:
            words = torch.tensor([how.key])
            key = (words - ((words >> 31) << 32)).to(torch.int32)
            if d2t is not None:
                full = p.new_zeros(1, vocab)
                full[0, d2t] = p[0]
                p = full
            place, law = int(coupled_argmax(p, key)), None
            if d2t is not None:
                return _ahead(how, place), None
    return _ahead(how, place if d2t is None else int(d2t[place])), law


def _ahead(how: SlotDraw, token: int) -> int:
    if how.state is not None:
        how.state.advance(token)
    return token
