"""Draft blocks on a device, on fakes: what TorchDraftBlocks drafts, with and without graphs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from drafters.backbone import Rotary
from drafters.blocks import TorchDraftBlocks
from drafters.device_blocks import DeviceDraftBlocks
from drafters.device_head import Way
from drafters.dspark import DSparkDrafter
from drafters.hybrid import HybridDrafter
from drafters.ngram import NgramDrafter
from drafters.slots import SlotDraw
from engine.cuda.sdpa import SdpaBackend
from engine.models.decoder import FusedDecoder
from engine.native.draft import Span
from engine.params import SamplingParams
from engine.sampling import SamplingState
from engine.torch_executor import TorchExecutor
from tests.drafters.test_draft_model import model_of
from tests.engine.cuda.harness import Device
from tests.engine.harness import VOCAB, Engine
from tests.engine.test_native_draft import World

PAGES, SIZE = 60, 16


class Pair:
    """One draft model: in torch one block after another, and on a fake device side by side."""

    def __init__(
        self,
        kind: str = "markov",
        reduced: bool = False,
        window: int | None = None,
        attention: str = "flashinfer",
        dflash: bool = False,
    ) -> None:
        self.world = World(kind, reduced)
        self.model = model_of(self.world, window)
        if dflash:
            self.model.config = replace(self.model.config, sample_from_anchor=False)
        self.plain = TorchDraftBlocks(self.model, PAGES, SIZE)
        decoder = FusedDecoder(
            self.world.target_config,
            self.world.target_tensors.items(),
            torch.float32,
            max_positions=512,
        )
        self.decoder = decoder
        self.device = Device(decoder, PAGES, SIZE, attention)
        executor = self.device.executor
        self.blocks = DeviceDraftBlocks(
            self.model, PAGES, SIZE, executor.stream, executor.attention, executor.graphs
        )

    @property
    def gamma(self) -> int:
        return self.model.config.gamma

    def drafter(self, on_device: bool = True) -> DSparkDrafter:
        blocks = self.blocks if on_device else self.plain
        return DSparkDrafter(self.model.config, blocks, 16, "tiny", self.model.d2t)


def draws(count: int, state: SamplingState | None = None, keyed: bool = False, **params) -> list[SlotDraw]:
    fork = state.fork() if state is not None else None
    return [
        SlotDraw(
            SamplingParams(**params),
            u=0.15 + 0.2 * k,
            key=(7 + k, 2**31 + 11 * k) if keyed else None,
            state=fork,
        )
        for k in range(count)
    ]


def penalised(**params) -> tuple[SamplingState, dict]:
    return SamplingState(SamplingParams(**params), VOCAB, frozenset(), [3, 4]), params


def ways(gamma: int):
    """Batches of blocks that are drawn in every way, some short, with what they need at least."""
    hot = {"temperature": 9.0}
    yield Way.GREEDY, [draws(gamma, temperature=0.0), draws(2, temperature=0.0), draws(1, temperature=0.0)]
    yield Way.PLAIN, [draws(gamma, **hot), draws(3, temperature=0.0), draws(2, temperature=12.0)]
    yield (
        Way.ANY,
        [
            draws(gamma, top_p=0.8, **hot),
            draws(2, top_k=5, min_p=0.01, temperature=4.0),
            draws(3, keyed=True, **hot),
        ],
    )
    yield Way.ANY, [draws(gamma, **hot), draws(2, top_k=3, **hot), draws(gamma, temperature=0.0)]
    state, params = penalised(temperature=0.0, frequency_penalty=2.0, repetition_penalty=1.5)
    yield Way.GREEDY, [draws(gamma, state, **params), draws(2, temperature=0.0), draws(2, temperature=0.0)]
    state, params = penalised(temperature=5.0, top_p=0.9, presence_penalty=2.0, logit_bias={5: 4.0})
    yield Way.ANY, [draws(3, **hot), draws(gamma, state, **params), draws(1, keyed=True, **hot)]


def spans_of(hows) -> list[Span]:
    starts, pages = (20, 5, 0), np.array([[7, 3], [17, 13], [27, 23]], dtype=np.int32)
    return [Span(start, len(how), own) for start, how, own in zip(starts, hows, pages, strict=True)]


def same(found, wanted) -> None:
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.tokens == theirs.tokens
        assert ours.confidence == pytest.approx(theirs.confidence, abs=1e-4)
        assert (ours.laws is None) == (theirs.laws is None)
        if ours.laws is not None:
            assert ours.laws.shape == theirs.laws.shape
            assert (ours.laws - theirs.laws).abs().max() < 1e-4


CASES = {
    "window": {"window": 16},
    "narrow": {"window": 3},
    "pages": {},
    "pages in torch": {"attention": "sdpa"},
    "reduced": {"window": 16, "reduced": True},
    "gated": {"kind": "gated"},
    "rnn": {"kind": "rnn", "window": 16, "reduced": True},
    "dflash": {"dflash": True},
    "dflash window": {"dflash": True, "window": 7},
}


@pytest.mark.parametrize("recorded", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("case", CASES)
def test_blocks_are_those_of_one_after_another(case, recorded):
    pair = Pair(**CASES[case])
    features = torch.randn(25, 3 * 64)
    pages = np.array([[7, 3], [17, 13]], dtype=np.int32)
    context = [Span(0, 20, pages[0]), Span(0, 5, pages[1])]
    if recorded:
        pair.blocks.capture(4, 64)
    for blocks in (pair.plain, pair.blocks):
        blocks.write_context(context, features)
    replayed = pair.device.graphs.replayed
    for way, hows in ways(pair.gamma):
        assert Way.of(hows) is way
        spans, anchors = spans_of(hows), [4, 8, 6]
        wanted = pair.plain.draft(spans, anchors, again(hows))
        same(pair.blocks.draft(spans, anchors, again(hows)), wanted)
    expected = 4 if recorded and case != "pages in torch" else 0
    assert pair.device.graphs.replayed - replayed == expected, "all but those with processors"


def again(hows):
    """Fresh states: in torch they run ahead with the block."""
    return [
        [
            replace(how, state=fork)
            for how, fork in zip(
                of_block, [of_block[0].state and of_block[0].state.fork()] * len(of_block), strict=True
            )
        ]
        for of_block in hows
    ]


def test_laws_outlive_the_next_draft():
    """A block may wait for its verification while others are drafted."""
    pair = Pair(window=16)
    pair.blocks.capture(4, 64)
    hows = [draws(5, temperature=9.0), draws(2, temperature=3.0), draws(1, temperature=5.0)]
    first = pair.blocks.draft(spans_of(hows), [4, 8, 6], hows)
    kept = [drawn.laws.clone() for drawn in first]
    pair.blocks.draft(spans_of(hows), [9, 1, 2], hows)
    for drawn, before in zip(first, kept, strict=True):
        assert torch.equal(drawn.laws, before)


def test_one_copy_to_the_host_for_all_blocks():
    pair = Pair(window=16)
    hows = [draws(5, temperature=9.0), draws(2, temperature=0.0), draws(1, temperature=5.0, top_k=3)]
    before = pair.device.stream.fetched
    pair.blocks.draft(spans_of(hows), [4, 8, 6], hows)
    assert pair.device.stream.fetched == before + 1


@pytest.mark.parametrize("window", [None, 16])
def test_a_request_that_is_broken_hurts_no_other(window):
    """Features that are no numbers: its block begins with the first token, and others are as alone."""
    pair = Pair(window=window)
    features = torch.randn(25, 3 * 64)
    pages = np.array([[7, 3], [17, 13]], dtype=np.int32)
    context = [Span(0, 20, pages[0]), Span(0, 5, pages[1])]
    spans, hows = [Span(20, 4, pages[0]), Span(5, 4, pages[1])], [draws(4, temperature=9.0) for _ in range(2)]
    pair.blocks.write_context(context, features)
    alone = pair.blocks.draft(spans[1:], [8], hows[1:])
    features[:20] = torch.nan
    pair.blocks.write_context(context, features)
    broken, other = pair.blocks.draft(spans, [4, 8], hows)
    assert broken.tokens == [0] * 4
    assert broken.laws[:, 0].tolist() == [1.0] * 4
    same([other], alone)
    # its pages, taken by another whose context does not reach as far
    pair.blocks.write_context([Span(0, 5, pages[0])], features[20:])
    same(pair.blocks.draft([Span(5, 4, pages[0])], [8], hows[1:]), alone)


REQUESTS = {
    str(i): (
        [3 + i, 5, 7, 9 + i] * (2 + 3 * i),
        {
            "max_tokens": 20,
            "ignore_eos": True,
            **(
                {"temperature": 0.0},
                {"seed": i, "top_p": 0.95},
                {"temperature": 1.0},
                {"temperature": 0.8, "top_k": 9},
                {"temperature": 0.0, "frequency_penalty": 0.5},
            )[i % 5],
        },
    )
    for i in range(7)
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "settings"),
    [("window", {}), ("pages", {"num_pages": 14}), ("reduced", {"token_budget": 20}), ("dflash", {})],
)
def test_texts_and_drafts_of_the_whole_engine_are_those_in_torch(case, settings):
    pair = Pair(**CASES[case])
    settings = dict(settings)
    pages = settings.pop("num_pages", PAGES)
    drafted: list[dict] = []

    def remembering(drafter: DSparkDrafter) -> DSparkDrafter:
        seen: dict = {}
        drafted.append(seen)
        plain = drafter.draft

        def draft(requests):
            blocks = plain(requests)
            for request, block in zip(requests, blocks, strict=True):
                seen[request.sequence, tuple(request.tokens.tolist())] = block.tokens
            return blocks

        drafter.draft = draft
        return drafter

    torch_engine = Engine(
        pair.decoder,
        remembering(pair.drafter(on_device=False)),
        "fixed:4",
        num_pages=pages,
        page_size=SIZE,
        dtype=torch.float32,
        **settings,
    )
    pair.device.executor.resize(pages)
    pair.blocks.pool.resize(pages)
    pair.blocks.capture(8, 128)
    engine = pair.device.engine(remembering(pair.drafter()), "fixed:4", capture=40, **settings)
    for each in (torch_engine, engine):
        for name, (prompt, params) in REQUESTS.items():
            each.add(name, prompt, **params)
        each.run()
    assert engine.texts() == torch_engine.texts()
    assert drafted[0] == drafted[1]
    assert len(drafted[0]) > 20
    assert pair.device.graphs.replayed > 10


def test_two_copies_to_the_host_make_a_step():
    pair = Pair(window=16)
    engine = pair.device.engine(pair.drafter(), "fixed:4", capture=40)
    for name, (prompt, params) in list(REQUESTS.items())[:4]:
        engine.add(name, prompt, **params)
    while engine.loop.has_work:
        before = pair.device.stream.fetched
        if engine.step():
            assert pair.device.stream.fetched <= before + 2


def test_beside_prompt_lookup_laws_on_the_device_go_through_the_loop():
    pair = Pair(window=16)
    drafter = HybridDrafter(NgramDrafter(2, 4), pair.drafter())
    engine = pair.device.engine(drafter, "fixed:4", capture=40)
    plain = Engine(pair.decoder, None, "off", page_size=SIZE, dtype=torch.float32)
    greedy = {name: each for name, each in REQUESTS.items() if int(name) % 5 in (0, 1)}
    for each in (engine, plain):
        for name, (prompt, params) in greedy.items():
            each.add(name, prompt, **params)
        each.run()
    assert engine.texts() == plain.texts()


def test_attention_in_torch_records_windows_all_the_same():
    pair = Pair(window=16, attention="sdpa")
    assert isinstance(pair.device.executor.attention, SdpaBackend)
    pair.blocks.capture(2, 64)
    assert pair.device.graphs.captured == 2 * 3
    whole = Pair(attention="sdpa")
    whole.blocks.capture(2, 64)
    assert whole.device.graphs.captured == 0


def test_angles_are_not_rounded_with_the_weights():
    """As the loader does it: 16 bits for weights, 32 for frequencies."""
    pair = Pair()
    model = pair.model.to(torch.bfloat16)
    assert not torch.equal(model.rotary.frequencies.float(), Rotary(model.config.layers).frequencies)
    model.rotary = Rotary(model.config.layers)
    assert model.rotary.frequencies.dtype == torch.float32
    rotated = model.rotary(torch.ones(1, 1, 32, dtype=torch.bfloat16), torch.tensor([100_000]))
    assert rotated.dtype == torch.bfloat16


def test_the_torch_executors_engine_is_the_reference():
    """Guards the tests above: both engines run the same model."""
    pair = Pair()
    assert isinstance(Engine(pair.decoder, None, dtype=torch.float32).executor, TorchExecutor)
