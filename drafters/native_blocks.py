"""`DraftBlocks` on the native executor: three calls of the kernels for all sequences of a step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch

from drafters.checkpoint import ALIASED, load_tensors
from drafters.config import DraftConfig
from drafters.slots import Drawn, SlotDraw, adjust
from drafters.stored_tensors import differs
from drafters.target_tensors import TargetTensors
from engine.native.draft import NativeDraftModel, SequentialHead, Slot, Span
from engine.native.rows import KINDS
from engine.native.weights import Rows, Weights, as_bf16, in_q4
from engine.native_executor import NativeExecutor

_HEADS = {"none": "none", "vanilla": "markov", "gated": "gated", "rnn": "rnn"}


class NativeDraftBlocks:
    """Loads a checkpoint beside a target. Raises NativeError, FileNotFoundError or ValueError.

    `head` [V, d] are the target's rows, needed where the checkpoint restricts the vocabulary. `small` keeps
    the matrices in Q4 blocks instead of bf16, a restricted head among them. `borrowed` reads the target's
    embedding and head, which those in a checkpoint are compared with; without it a checkpoint's own are
    passed over.
    """

    def __init__(
        self,
        folder: Path,
        target: NativeExecutor,
        head: Rows,
        max_positions: int,
        small: bool = False,
        borrowed: Callable[[], TargetTensors] | None = None,
    ) -> None:
        config, tensors = load_tensors(folder)
        self.config = config
        d2t = tensors.pop("d2t", None)
        shrink = in_q4 if small else _as_they_are
        weights = shrink(as_bf16((name, value) for name, value in tensors.items() if name not in ALIASED))
        ids = None if d2t is None else d2t.numpy().astype(np.int32)
        own_head = None if borrowed is None else _own_head(tensors, borrowed, d2t, shrink)
        if own_head is None and ids is not None:
            restricted = Rows(head.format, np.ascontiguousarray(head.data[ids]), head.cols)
            own_head = _only(shrink({"lm_head.weight": restricted}))
        self.d2t = d2t
        self.model = NativeDraftModel(
            target.model,
            config.layers,
            weights,
            _sequential_head(config, tensors, ids, shrink),
            target.num_pages,
            target.threads,
            max_positions,
            own_head,
        )

    def write_context(self, spans: Sequence[Span], features: torch.Tensor) -> None:
        self.model.write_context(spans, features)

    def draft(
        self, spans: Sequence[Span], anchors: Sequence[int], draws: Sequence[list[SlotDraw]]
    ) -> list[Drawn]:
        tokens: list[int] = []
        unread = self.config.unread
        rows = [Span(span.start, span.count + unread, span.pages) for span in spans] if unread else spans
        for span, anchor in zip(rows, anchors, strict=True):
            tokens += [anchor, *[self.config.mask_token_id] * (span.count - 1)]
        logits, hidden = self.model.backbone(rows, tokens)
        hows = [(index, how) for index, of_block in enumerate(draws) for how in of_block]
        slots = (Slot * len(hows))()
        lawful = [not how.params.greedy and how.key is None for _, how in hows]
        laws = torch.empty(sum(lawful), self.model.vocab)
        at = laws.data_ptr()
        for row, (slot, (index, how), has_law) in enumerate(zip(slots, hows, lawful, strict=True)):
            params = how.params
            slot.row, slot.sequence = row + unread * (index + 1), index
            slot.kind = KINDS["greedy" if params.greedy else "rejection" if how.key is None else "coupled"]
            if params.greedy:
                continue
            slot.temperature, slot.top_k = params.temperature, max(params.top_k, 0)
            slot.top_p, slot.min_p, slot.u = params.top_p, params.min_p, how.u
            if how.key is not None:
                slot.key0, slot.key1 = how.key
            if has_law:
                slot.law = at
                at += 4 * self.model.vocab
        adjusting = any(how.state is not None for _, how in hows)
        ahead = partial(self._adjust, slots, draws, logits) if adjusting else None
        self.model.sequential(slots, anchors, logits, hidden, ahead)
        return self._collect(slots, draws, laws)

    def _adjust(
        self, packed: ctypes.Array[Slot], draws: Sequence[list[SlotDraw]], logits: torch.Tensor, k: int
    ) -> None:
        """Let the states of all blocks follow up to slot k, and change its logits."""
        first = 0
        for of_block in draws:
            if k < len(of_block) and (state := of_block[k].state) is not None:
                if k:
                    state.advance(packed[first + k - 1].token)
                adjust(logits[packed[first + k].row], state, self.d2t)
            first += len(of_block)

    def _collect(
        self, packed: ctypes.Array[Slot], draws: Sequence[list[SlotDraw]], laws: torch.Tensor
    ) -> list[Drawn]:
        slots, out, row, law = list(packed), [], 0, 0
        for of_block in draws:
            mine = slots[row : row + len(of_block)]
            row += len(of_block)
            count = sum(slot.law is not None for slot in mine)
            out.append(
                Drawn(
                    [slot.token for slot in mine],
                    laws[law : law + count] if count else None,
                    [slot.confidence for slot in mine] if self.config.confidence else None,
                )
            )
            law += count
        return out


def _as_they_are(weights: Weights) -> Weights:
    return weights


def _only(weights: Weights) -> Rows:
    (rows,) = weights.values()
    assert isinstance(rows, Rows)
    return rows


def _own_head(
    tensors: Mapping[str, torch.Tensor],
    borrowed: Callable[[], TargetTensors],
    d2t: torch.Tensor | None,
    shrink: Callable[[Weights], Weights],
) -> Rows | None:
    """The checkpoint's head, if it has one that is no copy of the target's rows.

    Raises ValueError for an embedding of its own: the kernels embed with the target's.
    """
    embedding, head = (tensors.get(name) for name in ALIASED)
    if embedding is None and head is None:
        return None
    target = borrowed()
    if differs(embedding, target.embedding):
        raise ValueError("the draft model has an embedding of its own, which only --executor torch supports")
    if head is None or not differs(head, target.head if d2t is None else target.head[d2t]):
        return None
    return _only(shrink(as_bf16([("lm_head.weight", head)])))


def _sequential_head(
    config: DraftConfig,
    tensors: dict[str, torch.Tensor],
    ids: np.ndarray | None,
    shrink: Callable[[Weights], Weights],
) -> SequentialHead:
    def rows(name: str, shrink: Callable[[Weights], Weights] = shrink) -> Rows | None:
        value = tensors.get(name)
        if value is None:
            return None
        return _only(shrink(as_bf16([("x", value)])))

    def vector(name: str) -> np.ndarray | None:
        value = tensors.get(name)
        return None if value is None else np.ascontiguousarray(value.float().numpy().reshape(-1))

    mix = {"gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}.get(config.head)
    confidence = vector("confidence_head.proj.weight") if config.confidence else None
    if confidence is not None and not config.confidence_with_markov:
        confidence = np.concatenate([confidence, np.zeros(config.rank, np.float32)])
    bias = vector("confidence_head.proj.bias")
    return SequentialHead(
        _HEADS[config.head],
        rows("markov_head.markov_w1.weight", _as_they_are),  # single rows are read, not multiplied
        rows("markov_head.markov_w2.weight"),
        rows(f"{mix}.weight") if mix else None,
        vector(f"{mix}.bias") if mix else None,
        confidence,
        0.0 if bias is None else float(bias[0]),
        ids,
    )
