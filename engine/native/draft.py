"""A draft model on the kernels' side: context K/V, the block's backbone, the sequential head.

The blocks from which drafters are put together. A draft model shares embedding, and perhaps the head, with
the target, and has K/V pools of its own over the same page ids.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.models.config import ModelConfig
from engine.models.weights import CorruptModel
from engine.native.loader import check
from engine.native.model import DRAFT, NativeModel
from engine.native.weights import Rows, Weights

_BEFORE = ctypes.CFUNCTYPE(None, ctypes.c_int)

HEAD_KINDS = {"none": 0, "markov": 1, "gated": 2, "rnn": 3}


class Slot(ctypes.Structure):
    """One row of a drafted block: how its token is chosen, and what was; see engine/native/src/model.h."""

    _fields_ = (
        ("row", ctypes.c_int32),
        ("sequence", ctypes.c_int32),
        ("temperature", ctypes.c_float),
        ("kind", ctypes.c_int32),
        ("top_p", ctypes.c_double),
        ("min_p", ctypes.c_double),
        ("u", ctypes.c_double),
        ("top_k", ctypes.c_int32),
        ("key0", ctypes.c_uint32),
        ("key1", ctypes.c_uint32),
        ("confidence", ctypes.c_float),
        ("law", ctypes.c_void_p),
        ("token", ctypes.c_int64),
    )


@dataclass(frozen=True, slots=True)
class Span:
    """`count` rows of one sequence from position `start` on, and the sequence's pages."""

    start: int
    count: int
    pages: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SequentialHead:
    """Weights of the head that makes slot k depend on the token at slot k - 1 (paper eq. 5 to 8).

    `previous` [tokens, rank] (W1), `bias` [vocab, rank] (W2). `mix` [rank, hidden + rank] of a gated head
    over [h; e], or [3 rank, 2 rank + hidden] of a recurrent one over [s; e; h], with its bias. `confidence`
    [hidden + rank] over [h; e]. `ids` [vocab]: target ids of a reduced draft vocabulary.
    """

    kind: str
    previous: Rows | None = None
    bias: Rows | None = None
    mix: Rows | None = None
    mix_bias: npt.NDArray[np.float32] | None = None
    confidence: npt.NDArray[np.float32] | None = None
    confidence_bias: float = 0.0
    ids: npt.NDArray[np.int32] | None = None

    @property
    def rank(self) -> int:
        return self.previous.cols if self.previous is not None else 0


class NativeDraftModel:
    """`weights` hold the layers, `norm.weight`, `fc.weight` [hidden, m * d] and `hidden_norm.weight`.

    `head_rows` [vocab, hidden] is its own head; None: the target's. Raises NativeError, or
    CorruptModel for shapes that are not the config's.
    """

    def __init__(
        self,
        target: NativeModel,
        config: ModelConfig,
        weights: Weights,
        head: SequentialHead,
        num_pages: int,
        threads: int,
        max_positions: int,
        head_rows: Rows | None = None,
    ) -> None:
        self.target = target  # kept alive: its embedding is used
        self.vocab = target.config.vocab_size if head_rows is None else head_rows.count
        self.model = NativeModel(config, self.vocab, num_pages, threads, max_positions, target.kernels)
        self.hidden_size = config.hidden_size
        library, handle = self.model.lib, self.model.handle
        fuse = weights["fc.weight"]
        assert isinstance(fuse, Rows)
        _check(fuse, head, target.config.vocab_size, self.hidden_size, self.vocab)
        self.model.set_matrix(DRAFT, 0, fuse)
        self.model.set_norm(DRAFT, 0, weights, "hidden_norm.weight")
        self.model.set_layers(weights)
        check(library.dspark_borrow(handle, target.handle, int(head_rows is None)))
        if head_rows is not None:
            self.model.set_matrix(-1, 0, head_rows)
        if head.bias is not None:
            self.model.set_matrix(DRAFT, 1, head.bias)
        if head.mix is not None:
            self.model.set_matrix(DRAFT, 2, head.mix, head.mix_bias)
        previous = np.ascontiguousarray(head.previous.data) if head.previous is not None else None
        status = library.dspark_set_draft(
            handle,
            HEAD_KINDS[head.kind],
            head.rank,
            None if previous is None else previous.ctypes.data,
            0 if head.previous is None else head.previous.count,
            None if head.confidence is None else head.confidence.ctypes.data,
            head.confidence_bias,
            None if head.ids is None else head.ids.ctypes.data,
        )
        check(status)

    def write_context(self, spans: Sequence[Span], features: torch.Tensor) -> None:
        """K and V of every layer from the target's features [rows of all spans, m * d], fp32."""
        layout, pages = _layout(spans)
        features = features.contiguous()
        check(
            self.model.lib.dspark_context(
                self.model.handle, len(spans), layout, pages.ctypes.data, features.data_ptr()
            )
        )

    def backbone(
        self, spans: Sequence[Span], tokens: Sequence[int], causal: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The block's rows through all layers: (logits [rows, vocab], hidden [rows, d] after the final norm).

        Not causal: each row sees the context and its whole block (paper section 3.1). K and V of the block
        go to the positions behind the context, where the next context overwrites them.
        """
        layout, pages = _layout(spans)
        rows = sum(span.count for span in spans)
        logits, hidden = torch.empty(rows, self.vocab), torch.empty(rows, self.hidden_size)
        check(
            self.model.lib.dspark_forward(
                self.model.handle,
                len(spans),
                layout,
                pages.ctypes.data,
                (ctypes.c_int32 * rows)(*tokens),
                rows,
                (ctypes.c_int32 * rows)(*range(rows)),
                logits.data_ptr(),
                0,
                None,
                None,
                int(causal),
                hidden.data_ptr(),
            )
        )
        return logits, hidden

    def sequential(
        self,
        slots: ctypes.Array[Slot],
        anchors: Sequence[int],
        logits: torch.Tensor,
        hidden: torch.Tensor,
        before: Callable[[int], None] | None = None,
    ) -> None:
        """Choose the tokens of all slots, filling in `token`, `confidence` and, where asked for, the law.

        anchors [sequences]; logits and hidden as `backbone` returns them. The logits are corrected in place.
        `before` is called ahead of every sequence's slot k, when slots 0 to k - 1 are filled in, and may
        change the logits of slot k.
        """
        failed: list[Exception] = []

        def guarded(slot: int) -> None:  # no exception may pass through the kernels
            assert before is not None
            try:
                if not failed:
                    before(slot)
            except Exception as error:
                failed.append(error)

        check(
            self.model.lib.dspark_draft(
                self.model.handle,
                slots,
                len(slots),
                (ctypes.c_int32 * len(anchors))(*anchors),
                len(anchors),
                logits.data_ptr(),
                hidden.data_ptr(),
                None if before is None else _BEFORE(guarded),
            )
        )
        if failed:
            raise failed[0]


def _check(fuse: Rows, head: SequentialHead, tokens: int, hidden: int, vocab: int) -> None:
    """The kernels trust these shapes."""
    rank = head.rank
    mix = {"gated": (rank, hidden + rank), "rnn": (3 * rank, 2 * rank + hidden)}.get(head.kind, (0, 0))
    for name, rows, wanted in (
        ("fc", fuse, (hidden, fuse.cols)),
        ("markov_w1", head.previous, (tokens, rank)),
        ("markov_w2", head.bias, (vocab, rank)),
        ("head", head.mix, mix),
    ):
        if rows is not None and (rows.count, rows.cols) != wanted:
            raise CorruptModel(f"{name} is {[rows.count, rows.cols]}, but must be {list(wanted)}")
    if head.confidence is not None and len(head.confidence) != hidden + rank:
        raise CorruptModel(f"the confidence head reads {len(head.confidence)} values, not {hidden + rank}")


def _layout(spans: Sequence[Span]) -> tuple[ctypes.Array[ctypes.c_int32], npt.NDArray[np.int32]]:
    layout, at = [], 0
    for span in spans:
        layout += [span.count, span.start, at]
        at += len(span.pages)
    pages = np.concatenate([span.pages for span in spans])
    return (ctypes.c_int32 * len(layout))(*layout), pages
