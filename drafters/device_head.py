"""The sequential head of many blocks at once, on a device: slot by slot, all blocks side by side.

The same laws and draws as `drafters.slots.choose` has for one. What it does follows from how the batch is
drawn (`Way`), never from values, so it can be recorded: except where requests' penalties, bias or minimum
length change logits by the tokens before, which are then fetched slot by slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch

from drafters.model import DraftModel
from drafters.slots import SlotDraw, adjust
from engine.cuda.filters import Filters, coupled_argmax, cut, filtered, softmax
from engine.cuda.staging import Array
from engine.cuda.stream import Stream
from engine.draws import inverse_cdf
from engine.sampling import SamplingState


class Way(Enum):
    """What a batch of blocks needs: each can do what those before it can."""

    GREEDY = 0
    PLAIN = 1  # temperature only
    ANY = 2  # filters, coupled noise

    @classmethod
    def of(cls, draws: Sequence[list[SlotDraw]]) -> Way:
        way = cls.GREEDY
        for of_block in draws:
            how = of_block[0]
            if not how.params.greedy:
                if how.key is not None or filtered(how.params):
                    return cls.ANY
                way = cls.PLAIN
        return way


@dataclass(frozen=True, slots=True)
class BlockDraws:
    """How N blocks of at most `gamma` tokens are drawn; one line each.

    kind [N]: 0 greedy, 1 by u [N, gamma], 2 under keys [N, gamma, 2]; cuts [N] whether there are filters.
    """

    kind: torch.Tensor
    cuts: torch.Tensor
    u: torch.Tensor
    keys: torch.Tensor
    filters: Filters

    @staticmethod
    def fields(blocks: int, gamma: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and types of what `arrays` makes."""
        return {
            "kind": ((blocks,), torch.int64),
            "cuts": ((blocks,), torch.int64),
            "u": ((blocks, gamma), torch.float64),
            "keys": ((blocks, gamma, 2), torch.int32),
            "temperature": ((blocks,), torch.float64),
            "top_k": ((blocks,), torch.int64),
            "top_p": ((blocks,), torch.float64),
            "min_p": ((blocks,), torch.float64),
        }

    @staticmethod
    def arrays(draws: Sequence[list[SlotDraw]], blocks: int, gamma: int) -> dict[str, Array]:
        """On the host; lines without a block are greedy."""
        params = [of_block[0].params for of_block in draws]
        kind, cuts = np.zeros(blocks, dtype=np.int64), np.zeros(blocks, dtype=np.int64)
        u, keys = np.zeros((blocks, gamma)), np.zeros((blocks, gamma, 2), dtype=np.uint32)
        for line, of_block in enumerate(draws):
            how = of_block[0]
            cuts[line] = filtered(how.params)
            if how.params.greedy:
                continue
            kind[line] = 1 if how.key is None else 2
            if how.key is None:
                u[line, : len(of_block)] = [each.u for each in of_block]
            else:
                keys[line, : len(of_block)] = [each.key or (0, 0) for each in of_block]
        out: dict[str, Array] = {"kind": kind, "cuts": cuts, "u": u, "keys": keys.view(np.int32)}
        names = ("temperature", "top_k", "top_p", "min_p")
        for name, values, rest in zip(names, Filters.arrays(params), (1.0, 0, 1.0, 0.0), strict=True):
            out[name] = np.full(blocks, rest, dtype=values.dtype)
            out[name][: len(values)] = values
        return out

    @classmethod
    def of(cls, fields: dict[str, torch.Tensor]) -> BlockDraws:
        filters = Filters(fields["temperature"], fields["top_k"], fields["top_p"], fields["min_p"])
        return cls(fields["kind"], fields["cuts"], fields["u"], fields["keys"], filters)


@dataclass(frozen=True, slots=True)
class BlockTokens:
    """Of N blocks: tokens [N, gamma] int64 (target ids), confidence [N, gamma] fp32, laws [N, gamma, V'].

    `laws` are None where nothing was drawn from any.
    """

    tokens: torch.Tensor
    confidence: torch.Tensor
    laws: torch.Tensor | None


def draw_blocks(
    model: DraftModel,
    hidden: torch.Tensor,
    anchors: torch.Tensor,
    draws: BlockDraws,
    way: Way,
    out: BlockTokens,
    states: dict[int, SamplingState] | None = None,
    stream: Stream | None = None,
) -> None:
    """Fill `out` from hidden [N, gamma, d] of the slots and the anchors' tokens [N].

    `states` are copies, on the device, of those requests that change logits, by line; they run ahead.
    """
    base = hidden @ model.head.T
    previous, state = anchors, hidden.new_zeros(len(hidden), model.config.rank)
    for k in range(hidden.shape[1]):
        logits, embedded = base[:, k], None
        if model.markov_head is not None:
            embedded = model.markov_head.markov_w1(previous)
            mixed, state = model.markov_head.step(embedded, hidden[:, k], state)
            logits = logits + model.markov_head.markov_w2(mixed)
        if model.confidence_head is not None:
            kind = model.confidence_head.proj.weight.dtype
            before = None if embedded is None else embedded.to(kind)
            out.confidence[:, k].copy_(model.confidence_head(hidden[:, k].to(kind), before))
        logits = logits.float()
        for line, own in (states or {}).items():
            adjust(logits[line], own, model.d2t)
        law = None if out.laws is None else out.laws[:, k]
        previous = _choose(model, logits, k, draws, way, law)
        out.tokens[:, k].copy_(previous)
        if states and stream is not None:
            chosen = stream.fetch(previous).tolist()
            for line, own in states.items():
                own.advance(chosen[line])


def _choose(
    model: DraftModel, logits: torch.Tensor, k: int, draws: BlockDraws, way: Way, law: torch.Tensor | None
) -> torch.Tensor:
    """Tokens [N] of slot k as target ids; `law` [N, V'] is where the laws go. logits [N, V'] fp32."""
    places = logits.argmax(-1)
    if way is Way.GREEDY:
        return _targets(model, places)
    assert law is not None
    p = softmax(logits, draws.filters.temperature)
    if way is Way.ANY:
        p = torch.where((draws.cuts > 0)[:, None], cut(p, draws.filters), p)
    broken = ~logits.amax(-1).isfinite()
    p = p.masked_fill_(broken[:, None], 0.0)  # a broken row proposes the first token for certain
    p[:, 0] += broken
    law.copy_(p)
    places = torch.where(draws.kind == 1, inverse_cdf(p, draws.u[:, k]), places)
    tokens = _targets(model, places)
    if way is Way.ANY:
        if model.d2t is not None:  # coupled noise belongs to target tokens
            p = p.new_zeros(len(p), model.config.layers.vocab_size).index_copy_(1, model.d2t, p)
        tokens = torch.where(draws.kind == 2, coupled_argmax(p, draws.keys[:, k]), tokens)
    return tokens


def _targets(model: DraftModel, places: torch.Tensor) -> torch.Tensor:
    return places if model.d2t is None else model.d2t[places]
