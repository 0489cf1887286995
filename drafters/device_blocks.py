"""`DraftBlocks` on a device: the blocks of all requests in one pass, recorded by number of blocks.

Only tokens and confidences come back to the host. Laws stay where verification needs them, copied out of what
the recorded pass writes, since a block may wait while others are drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import torch

from drafters.backbone import Layer
from drafters.device_arrays import BlockArrays
from drafters.device_attention import BlockAttend, PageAttend, WindowAttend
from drafters.device_head import BlockDraws, BlockTokens, Way, draw_blocks
from drafters.model import DraftModel
from drafters.slots import Drawn, SlotDraw
from engine.batch import Tokens
from engine.cuda.attention import Attention, AttentionBackend, AttentionShape
from engine.cuda.graphs import GraphBackend, Progress, Replay, bucket_for, bucket_sizes, capture_all
from engine.cuda.kv_pool import KVPool
from engine.cuda.paging import paged_rows
from engine.cuda.staging import Inputs, Staging
from engine.cuda.stream import Stream
from engine.native.draft import Span
from engine.params import SamplingParams
from engine.sampling import SamplingState


class DeviceDraftBlocks:
    """See `DraftBlocks`. The pool may be resized until `capture`, after which passes are replayed."""

    def __init__(
        self,
        model: DraftModel,
        num_pages: int,
        page_size: int,
        stream: Stream,
        attention: AttentionBackend,
        graphs: GraphBackend | None = None,
    ) -> None:
        self.model, self.stream = model.eval(), stream
        config = model.config
        self.gamma, self.width = config.gamma, config.gamma + config.unread
        shapes, dtype = config.layers, model.fc.weight.dtype
        self.pool = KVPool(
            shapes.num_layers,
            num_pages,
            page_size,
            shapes.num_kv_heads,
            shapes.head_dim,
            dtype,
            stream.device,
        )
        self._attention = attention
        self.graphs = graphs if attention.capturable or config.window is not None else None
        self._shape = AttentionShape.of(shapes, page_size, dtype, causal=False)
        self._eager = None if config.window is not None else attention.eager(self._shape)
        self._staging = Staging(stream)
        self._inputs: dict[int, Inputs] = {}
        self._fixed: dict[int, Attention] = {}
        self._replays: dict[tuple[int, Way], Replay] = {}
        self._sizes: tuple[int, ...] = ()
        self._pages = 0  # ids that fit into a recorded attention
        self._out: BlockTokens | None = None  # of the largest recorded pass

    # ---- context

    @torch.inference_mode()
    def write_context(self, spans: Sequence[Span], features: torch.Tensor) -> None:
        """See `DraftBlocks.write_context`."""
        rows = paged_rows(spans, self.pool.page_size, self.pool.scratch)
        with self._staging.turn() as writer:
            positions, slots = writer.device(rows.positions, rows.slots)
        pairs = self.model.context(features.to(self.pool.dtype), positions)
        for layer, (k, v) in enumerate(pairs):
            self.pool.write(layer, slots, k, v)

    # ---- blocks

    @torch.inference_mode()
    def draft(
        self, spans: Sequence[Span], anchors: Sequence[int], draws: Sequence[list[SlotDraw]]
    ) -> list[Drawn]:
        """See `DraftBlocks.draft`."""
        way = Way.of(draws)
        states = {
            line: of_block[0].state.fork(self.stream.device)
            for line, of_block in enumerate(draws)
            if of_block[0].state is not None
        }
        recorded = None if states else self._recorded(spans, way)
        if recorded is None:
            blocks = self._arrays(spans, len(spans), recorded=False)
            out, attention = self._empty(len(spans), way), self._eager
            inputs = Inputs(self.stream.device, blocks.fields())
        else:
            blocks, replay = recorded
            out, attention = self._out_of(blocks.size, way), self._fixed.get(blocks.size)
            inputs = self._inputs[blocks.size]
        lawful = [i for i, of_block in enumerate(draws) if _has_law(of_block[0])]
        with self._staging.turn() as writer:
            (kept,) = writer.device(np.array(lawful, dtype=np.int64))
            inputs.fill(writer, blocks.arrays(anchors, draws))
            if attention is not None:
                attention.plan(blocks.rows, writer)
        if recorded is None:
            self._pass(inputs, attention, way, out, states)
        else:
            replay()
        laws = out.laws[kept] if lawful and out.laws is not None else None
        return self._collect(spans, out, lawful, laws)

    def _recorded(self, spans: Sequence[Span], way: Way) -> tuple[BlockArrays, Replay] | None:
        """The blocks padded to a recorded pass, and that pass, if there is one that they fit into."""
        size = bucket_for(len(spans), self._sizes)
        if size is None:
            return None
        blocks = self._arrays(spans, size)
        if size in self._fixed and len(blocks.rows.kv_indices) > self._pages:
            return None
        return blocks, self._replays[size, way]

    def _pass(
        self,
        inputs: Inputs,
        attention: Attention | None,
        way: Way,
        out: BlockTokens,
        states: dict[int, SamplingState] | None = None,
    ) -> None:
        """What is recorded: backbone and sequential head over the inputs."""
        window, config = self.model.config.window, self.model.config
        attend: BlockAttend
        if window is None:
            assert attention is not None
            attend = PageAttend(self.pool, attention, inputs["slots"], inputs["order"], inputs["places"])
        else:
            attend = WindowAttend(
                self.pool,
                window,
                self.width,
                inputs["pages"],
                inputs["first_page"],
                inputs["starts"],
                inputs["counts"],
            )
        hidden = _backbone(self.model, inputs["anchors"], inputs["starts"], self.width, attend)
        draws = BlockDraws.of(inputs.fields)
        read = hidden[:, config.unread :]
        draw_blocks(self.model, read, inputs["anchors"], draws, way, out, states, self.stream)

    def _collect(
        self, spans: Sequence[Span], out: BlockTokens, lawful: list[int], laws: torch.Tensor | None
    ) -> list[Drawn]:
        """Tokens and confidences to the host in one copy; laws [of the lawful blocks, gamma, V'] stay."""
        bits = out.confidence[: len(spans)].contiguous().view(torch.int32)
        answer = self.stream.fetch(torch.cat((out.tokens[: len(spans)].to(torch.int32), bits), 1))
        tokens: list[list[int]] = answer[:, : self.gamma].tolist()
        confidence: list[list[float]] = answer[:, self.gamma :].contiguous().view(torch.float32).tolist()
        of_line = dict(zip(lawful, () if laws is None else laws, strict=True))
        has_confidence = self.model.confidence_head is not None
        return [
            Drawn(
                tokens[line][: span.count],
                of_line[line][: span.count] if line in of_line else None,
                confidence[line][: span.count] if has_confidence else None,
            )
            for line, span in enumerate(spans)
        ]

    def _arrays(self, spans: Sequence[Span], size: int, recorded: bool = True) -> BlockArrays:
        return BlockArrays(self.model.config, self.pool, spans, size, recorded)

    def _empty(self, blocks: int, way: Way) -> BlockTokens:
        device, size = self.stream.device, (blocks, self.gamma)
        laws = None
        if way is not Way.GREEDY:
            laws = torch.empty((*size, self.model.config.vocab_size), device=device)
        return BlockTokens(
            torch.zeros(size, dtype=torch.int64, device=device), torch.zeros(size, device=device), laws
        )

    # ---- graphs

    @torch.inference_mode()
    def capture(self, most_blocks: int, max_positions: int, progress: Progress = lambda line: None) -> None:
        """Record passes over up to so many blocks; from now on they are replayed."""
        if self.graphs is None:
            return
        sizes = bucket_sizes(most_blocks)
        self._pages = sizes[-1] * -(-max_positions // self.pool.page_size)
        self._out = self._empty(sizes[-1], Way.ANY)
        for size in sizes:
            full = [Span(0, self.gamma, self._scratch_pages())] * size
            self._inputs[size] = Inputs(self.stream.device, self._arrays(full, size).fields())
        keys = list(product(sizes[::-1], (Way.ANY, Way.PLAIN, Way.GREEDY)))
        self._replays = capture_all(
            self.graphs, keys, self._prepare, progress, "drafting by number of blocks"
        )
        self._sizes = sizes

    def _prepare(self, key: tuple[int, Way]) -> Callable[[], None]:
        size, way = key
        if self._eager is not None and size not in self._fixed:
            rows = size * self.width
            self._fixed[size] = self._attention.fixed(self._shape, rows, max(self._pages, rows))
        full = [Span(0, self.gamma, self._scratch_pages())] * size
        blocks, inputs = self._arrays(full, size), self._inputs[size]
        attention, out = self._fixed.get(size), self._out_of(size, way)
        hows = [[SlotDraw(SamplingParams(), 0.5)] * self.gamma] * size
        with self._staging.turn() as writer:
            inputs.fill(writer, blocks.arrays([0] * size, hows))
            if attention is not None:
                attention.plan(blocks.rows, writer)
        return lambda: self._pass(inputs, attention, way, out)

    def _out_of(self, size: int, way: Way) -> BlockTokens:
        """Where a recorded pass writes to: all to the same place."""
        assert self._out is not None
        laws = None if way is Way.GREEDY or self._out.laws is None else self._out.laws[:size]
        return BlockTokens(self._out.tokens[:size], self._out.confidence[:size], laws)

    def _scratch_pages(self) -> Tokens:
        return np.full(-(-self.width // self.pool.page_size), self.pool.scratch, dtype=np.int32)


def _backbone(
    model: DraftModel, anchors: torch.Tensor, starts: torch.Tensor, width: int, attend: BlockAttend
) -> torch.Tensor:
    """`Backbone.block` over [anchor, mask, ...] with attention handed in: [N, width, d]."""
    x = model.slots(anchors, width)
    positions = starts[:, None] + torch.arange(width, device=starts.device)
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        own, normed = layer.self_attn, layer.input_layernorm(x)
        q = model.rotary(own.q_norm(own.q_proj(normed).unflatten(-1, (own.heads, own.dim))), positions)
        k, v = own.keys_and_values(normed, positions, model.rotary)
        x = x + own.o_proj(attend(number, q, k, v))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    out: torch.Tensor = model.norm(x)
    return out


def _has_law(how: SlotDraw) -> bool:
    return not how.params.greedy and how.key is None
