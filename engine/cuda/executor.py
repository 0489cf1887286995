"""The CUDA executor: verification from graphs, everything else step by step, on pools in the device's memory.

A step in which every sequence has one row and its drafts is padded to the next graph. Steps with prompts in
them run without one, prompt rows and verified rows in two calls of attention, since the planner picks one
tile of queries for all rows of a call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import BatchItem, ForwardOutput, VerificationBatch
from engine.cuda.attention import Attention, AttentionBackend, AttentionShape, PoolAttend
from engine.cuda.graphs import GraphBackend, Progress, Replay, bucket_for, bucket_sizes, capture_all
from engine.cuda.kv_pool import KVPool
from engine.cuda.paging import PagedRows, padded, paged_rows
from engine.cuda.staging import Inputs, Staging
from engine.cuda.stream import Stream
from engine.models.decoder import FusedDecoder
from engine.native.draft import Span

_NOWHERE = np.zeros(1, dtype=np.int32)  # a page list for rehearsals


class CudaExecutor:
    """See `Executor`. `model` must have been made for a fixed number of positions.

    `graphs` None: nothing is recorded. Pools may be resized until `capture`.
    """

    def __init__(
        self,
        model: FusedDecoder,
        num_pages: int,
        stream: Stream,
        attention: AttentionBackend,
        graphs: GraphBackend | None = None,
        page_size: int = 16,
    ) -> None:
        if model.max_positions is None:
            raise ValueError("a model on the device needs max_positions: it cannot look how far it must go")
        self.model = model
        self.config = model.config
        self.page_size, self.num_pages = page_size, num_pages
        self.stream, self.attention = stream, attention
        self.graphs = graphs
        config = model.config
        self.pool = KVPool(
            config.num_layers,
            num_pages,
            page_size,
            config.num_kv_heads,
            config.head_dim,
            model.dtype,
            stream.device,
        )
        self.shape = AttentionShape.of(config, page_size, model.dtype)
        self._eager = [attention.eager(self.shape) for _ in range(2)]
        self._staging = Staging(stream)
        #: the sizes that steps are padded to
        self.row_buckets: tuple[int, ...] = ()
        self._recorded = _Recorded()

    def resize(self, pages: int) -> None:
        """Another number of pages, all empty; not after `capture`."""
        self.num_pages = pages
        self.pool.resize(pages)

    # ---- graphs

    @torch.inference_mode()
    def capture(
        self,
        most_rows: int,
        most_sequences: int,
        feature_layers: tuple[int, ...] = (),
        progress: Progress = lambda line: None,
    ) -> None:
        """Record steps of up to `most_rows` rows; from now on they are replayed."""
        if self.graphs is None or not self.attention.capturable:
            return
        sizes = bucket_sizes(most_rows)
        pages_each = -(-(self.model.max_positions or 0) // self.page_size)
        recorded = self._recorded = _Recorded(feature_layers, most_sequences * pages_each)
        device, wide = self.stream.device, self.model.dtype == torch.float64
        recorded.logits = torch.zeros(
            (sizes[-1], self.config.vocab_size), dtype=torch.float64 if wide else torch.float32, device=device
        )
        recorded.features = torch.zeros(
            (sizes[-1], len(feature_layers) * self.config.hidden_size), dtype=self.model.dtype, device=device
        )
        for size in sizes:
            fields = dict.fromkeys(("tokens", "positions", "slots"), ((size,), torch.int64))
            recorded.inputs[size] = Inputs(device, fields)
        recorded.replays = capture_all(
            self.graphs, sizes[::-1], self._prepare, progress, "verification by number of rows"
        )
        self.row_buckets = sizes

    def _prepare(self, size: int) -> Any:
        """What a graph of so many rows records, each row a request of its own."""
        recorded, inputs = self._recorded, self._recorded.inputs[size]
        attention = self.attention.fixed(self.shape, size, max(recorded.pages, size))
        recorded.attentions[size] = attention
        rows = paged_rows(
            [Span(0, 1, _NOWHERE + self.pool.scratch)] * size, self.page_size, self.pool.scratch
        )
        with self._staging.turn() as writer:
            inputs.fill(writer, _row_inputs(np.zeros(0), rows, size))
            attention.plan(rows, writer)
        attend = PoolAttend(self.pool, inputs["slots"], [(attention, size)], self.shape.scale)

        def run() -> None:
            hidden, features = self.model.forward(
                inputs["tokens"], inputs["positions"], attend, recorded.feature_layers
            )
            recorded.logits[:size].copy_(self.model.head(hidden))
            if features is not None:
                recorded.features[:size].copy_(features)

        return run

    # ---- steps

    @torch.inference_mode()
    def forward(self, batch: VerificationBatch, feature_layers: tuple[int, ...] = ()) -> ForwardOutput:
        """See `Executor.forward`. The logits that a graph returns are overwritten by the next step."""
        size = bucket_for(batch.rows, self.row_buckets)
        recorded = self._recorded
        if (
            size is not None
            and feature_layers == recorded.feature_layers
            and all(map(_verified, batch.items))
        ):
            rows = paged_rows(batch.items, self.page_size, self.pool.scratch, size, size)
            if len(rows.kv_indices) <= recorded.pages:
                return self._replay(batch, rows, size)
        return self._step(batch, feature_layers)

    def _replay(self, batch: VerificationBatch, rows: PagedRows, size: int) -> ForwardOutput:
        recorded = self._recorded
        with self._staging.turn() as writer:
            recorded.inputs[size].fill(writer, _row_inputs(batch.tokens(), rows, size))
            recorded.attentions[size].plan(rows, writer)
        recorded.replays[size]()
        # Logits are read before the next step; a drafter may keep features for longer.
        features = recorded.features[: batch.rows].clone() if recorded.feature_layers else None
        return ForwardOutput(recorded.logits[: batch.rows], features)

    def _step(self, batch: VerificationBatch, feature_layers: tuple[int, ...]) -> ForwardOutput:
        groups = _by_kind(batch.items)
        ordered = VerificationBatch(tuple(batch.items[i] for group in groups for i in group))
        parts = [
            paged_rows([batch.items[i] for i in group], self.page_size, self.pool.scratch) for group in groups
        ]
        where = _new_places(batch.items, [i for group in groups for i in group])
        with self._staging.turn() as writer:
            tokens, positions, slots, wanted, back = writer.device(
                ordered.tokens().astype(np.int64),
                np.concatenate([part.positions for part in parts]),
                np.concatenate([part.slots for part in parts]),
                where[batch.logit_rows()],
                where,
            )
            attentions = self._eager[: len(parts)]
            for attention, part in zip(attentions, parts, strict=True):
                attention.plan(part, writer)
        counts = [len(part.positions) for part in parts]
        split = list(zip(attentions, counts, strict=True))
        attend = PoolAttend(self.pool, slots, split, self.shape.scale)
        hidden, features = self.model.forward(tokens, positions, attend, feature_layers)
        if features is not None and len(parts) > 1:
            features = features[back]
        return ForwardOutput(self.model.logits(hidden[wanted]), features)

    def describe(self) -> Mapping[str, Any]:
        """See `Executor.describe`."""
        device = self.stream.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        return {
            "executor": "cuda",
            "device": name,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "attention": self.attention.name,
            "graphs": len(self.row_buckets),
        }


class _Recorded:
    """What graphs read and write: inputs and attention for each size, outputs that all sizes share."""

    logits: torch.Tensor
    features: torch.Tensor

    def __init__(self, feature_layers: tuple[int, ...] = (), pages: int = 0) -> None:
        self.feature_layers = feature_layers
        self.pages = pages  # ids that fit
        self.inputs: dict[int, Inputs] = {}
        self.attentions: dict[int, Attention] = {}
        self.replays: dict[int, Replay] = {}


def _row_inputs(tokens: npt.NDArray[Any], rows: PagedRows, size: int) -> dict[str, npt.NDArray[np.int64]]:
    return {"tokens": padded(tokens, size), "positions": rows.positions, "slots": rows.slots}


def _verified(item: BatchItem) -> bool:
    """Whether all of an item's rows are its anchor and drafts, whose logits are all wanted."""
    return item.sample and item.count == 1 + item.verify


def _by_kind(items: Sequence[BatchItem]) -> list[list[int]]:
    """Indices of items with prompt rows, then of those without; a kind that does not occur is left out."""
    prompts = [i for i, item in enumerate(items) if not _verified(item)]
    others = [i for i, item in enumerate(items) if _verified(item)]
    return [group for group in (prompts, others) if group]


def _new_places(items: Sequence[BatchItem], order: Sequence[int]) -> npt.NDArray[np.int64]:
    """[T]: where each row of the batch is when its items are put into this order."""
    counts = np.array([item.count for item in items], dtype=np.int64)
    firsts = np.cumsum(counts) - counts
    old = np.concatenate([np.arange(firsts[i], firsts[i] + counts[i]) for i in order])
    where = np.empty_like(old)
    where[old] = np.arange(len(old))
    return where
