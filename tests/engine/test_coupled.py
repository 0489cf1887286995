"""Seeded requests: the text is a function of the request alone, whatever is drafted and verified."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from scipy import stats

from engine import draws, noise
from engine.batch import BatchItem, DraftBlock
from engine.draws import coupled_argmax
from engine.native import loader
from engine.noise import gumbels, row_keys
from engine.params import SamplingParams
from engine.sampling import SamplingState, probabilities
from engine.verification import verify
from tests.engine.enumerate import Branch, Enumeration, Text, World
from tests.engine.harness import one_thread  # noqa: F401
from tests.engine.hashing import signed, unmix
from tests.engine.plain_law import plain_law

PROCESSORS = {
    "none": SamplingParams(),
    "cold": SamplingParams(temperature=0.5),
    "hot": SamplingParams(temperature=1.75),
    "top-k": SamplingParams(top_k=2),
    "top-p": SamplingParams(top_p=0.7),
    "min-p": SamplingParams(min_p=0.3),
    "presence": SamplingParams(presence_penalty=1.5),
    "frequency": SamplingParams(frequency_penalty=0.75),
    "repetition": SamplingParams(repetition_penalty=2.0),
    "bias": SamplingParams(logit_bias={1: 2.0, 3: -100.0}),
    "min-tokens": SamplingParams(min_tokens=3),
    "allowed": SamplingParams(allowed_token_ids=(0, 1, 3)),
    "bad-words": SamplingParams(bad_words=((3,), (1, 2), (2, 2, 0))),
    "all": SamplingParams(
        temperature=0.75,
        top_p=0.95,
        top_k=3,
        min_p=0.02,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        repetition_penalty=1.25,
        logit_bias={0: 0.5},
        min_tokens=2,
    ),
}
each_processor = pytest.mark.parametrize("params", PROCESSORS.values(), ids=PROCESSORS.keys())


def noisy_argmax(law: Sequence[float], seed: int, choice: int, position: int) -> int:
    """argmax(log p + G) over the whole vocabulary, for the token at an absolute position."""
    keys = row_keys(torch.tensor([seed]), torch.tensor([choice]), torch.tensor([position]))
    g = gumbels(keys, torch.arange(len(law), dtype=torch.int32))[0].tolist()
    scores = [math.log(p) + noise if p else -math.inf for p, noise in zip(law, g, strict=True)]
    return scores.index(max(scores))


def plain_text(world: World, horizon: int) -> Text:
    """What decoding token by token says after the anchor."""
    seed = world.params.seed
    assert seed is not None
    text: Text = ()
    while len(text) < horizon and not world.ended(text):
        position = len(world.prompt) + len(world.output) + len(text)
        text += (noisy_argmax(world.p(text), seed, 0, position),)
    return text


@each_processor
def test_every_draft_and_length_gives_the_plain_text(params: SamplingParams) -> None:
    """All blocks of three tokens, also the absurd ones, at every verify length; ends included."""
    emitted = 0
    for seed in range(3):
        world = World(
            replace(params, seed=seed * 1000 - 3),
            seed=seed,
            gamma=3,
            stop_ids=frozenset({3}) if seed % 2 or params.min_tokens else frozenset(),
            budget=(100, 2, 3)[seed % 3],
        )
        text = plain_text(world, 4)
        branches = [Branch(0, block, length) for block, length in itertools.product(world.blocks(), range(4))]
        verdicts = Enumeration(world).run(branches)
        assert len(verdicts) == 4**3 * 4
        for branch, verdict in zip(branches, verdicts, strict=True):
            drafts = branch.block.tokens[: branch.verify]
            agreed = next((i for i, x in enumerate(drafts) if text[i : i + 1] != (x,)), branch.verify)
            assert verdict.tokens == text[: agreed + 1]
            assert verdict.accepted == min(agreed, len(text))
            end = len(verdict.tokens) == len(text) and world.ended(text)
            stopped = end and text[-1] in world.stop_ids
            assert verdict.finish == ("stop" if stopped else "length" if end else None)
            assert verdict.stop_token == (text[-1] if stopped else None)
            emitted = max(emitted, len(verdict.tokens))
    assert emitted == 4


def test_the_draft_law_is_not_looked_at() -> None:
    """Whatever q says, and whatever the uniforms would be."""
    for seed in range(10):
        world = World(SamplingParams(seed=seed), seed=seed, gamma=2)
        silent = {
            block.tokens: verdict
            for block, verdict in zip(
                world.blocks(),
                Enumeration(world).run([Branch(0, block, 2) for block in world.blocks()]),
                strict=True,
            )
        }
        for drafter, filler in itertools.product(("random", "processed", "reduced"), (0.0, 0.999)):
            liar = World(world.params, seed=seed, gamma=2, drafter=drafter)
            blocks = [block for block, _ in liar.drafts()]
            verdicts = Enumeration(liar, filler=filler).run([Branch(0, block, 2) for block in blocks])
            assert verdicts == [silent[block.tokens] for block in blocks]


class Chain:
    """A target over many tokens whose logits depend on the last two."""

    def __init__(self, vocab: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.tables = torch.from_numpy(rng.normal(size=(2, vocab, vocab)) * 2)

    def logits(self, text: Sequence[int]) -> torch.Tensor:
        return self.tables[0, text[-1]] + self.tables[1, text[-2]]


def decode(
    chain: Chain,
    params: SamplingParams,
    choice: int,
    prompt: list[int],
    total: int,
    rng: np.random.Generator | None,
    known: Sequence[int] = (),
    dtype: torch.dtype = torch.float64,
) -> list[int]:
    """Decode through `verify`, in rounds with random blocks and lengths (none without `rng`).

    Blocks follow `known` for a while and then say anything, so that every length is accepted now and then.
    """
    vocab = chain.tables.shape[-1]
    state = SamplingState(params, vocab, frozenset(), prompt, choice)
    output: list[int] = []
    while len(output) < total:
        block: list[int] = []
        if rng is not None:
            true, false = rng.integers(0, 7), rng.integers(0, 3)
            block = list(known[len(output) : len(output) + true]) + rng.integers(0, vocab, false).tolist()
        length = int(rng.integers(0, len(block) + 1)) if rng is not None else 0
        text = [*prompt, *output]
        item = BatchItem(
            sequence=0,
            history=np.asarray(text, dtype=np.int32),
            start=len(text) - 1,
            count=1 + length,
            pages=np.zeros(1, dtype=np.int32),
            sample=True,
            state=state,
            budget=total - len(output),
            round=int(rng.integers(1000)) if rng is not None else 0,
            draft=DraftBlock(tuple(block)) if block else None,
            verify=length,
        )
        rows = [chain.logits(text + block[:row]) for row in range(length + 1)]
        (verdict,) = verify([item], torch.stack(rows).to(dtype))
        output += verdict.tokens
    assert len(output) == total
    return output


@each_processor
def test_whole_texts_do_not_depend_on_rounds(params: SamplingParams) -> None:
    rng = np.random.default_rng(8)
    for case in range(2):
        chain = Chain(40, case)
        seeded = replace(params, seed=int(rng.integers(-(2**63), 2**63)))
        prompt = rng.integers(0, 40, int(rng.integers(2, 9))).tolist()
        text: list[int] = []
        for _ in range(30):  # token by token, from the definition
            law = plain_law(chain.logits([*prompt, *text]).tolist(), seeded, prompt, text)
            assert seeded.seed is not None
            text.append(noisy_argmax(law, seeded.seed, case, len(prompt) + len(text)))
        assert decode(chain, seeded, case, prompt, 30, None) == text
        for dtype in (torch.float64, torch.float32):
            assert decode(chain, seeded, case, prompt, 30, rng, text, dtype) == text


def test_seed_choice_and_position_change_the_text() -> None:
    chain = Chain(200, 0)

    def text(seed: int, choice: int, prompt: list[int]) -> list[int]:
        return decode(chain, SamplingParams(seed=seed), choice, prompt, 12, None)

    base = text(1, 0, [5, 6])
    assert text(1, 0, [5, 6]) == base
    others = [text(2, 0, [5, 6]), text(1, 1, [5, 6]), text(2**40 + 1, 0, [5, 6]), text(-1, 0, [5, 6])]
    others.append(text(1, 0, [9, 5, 6]))  # the same logits one position later
    assert len({tuple(each) for each in [base, *others]}) == 6


# ---- the argmax alone


def adversarial_laws(rng: np.random.Generator) -> list[torch.Tensor]:
    """Laws whose tails a shortcut might cut off: flat, steep, sparse, with denormals and zeros."""
    laws = []
    for vocab in (1, 2, 5, 300, 20_000):
        flat = np.full(vocab, 1.0)
        steep = np.exp(-np.arange(vocab) * 0.5)
        zipf = 1.0 / (1.0 + rng.permutation(vocab)) ** 1.5
        tiny = np.full(vocab, 1e-12)
        tiny[0] = 1.0
        sparse = np.where(rng.random(vocab) < 0.9, 0.0, rng.random(vocab))
        sparse[-1] = 1.0
        denormal = np.full(vocab, 1e-42)
        denormal[rng.integers(vocab)] = 1.0
        laws += [torch.from_numpy(law / law.sum()) for law in (flat, steep, zipf, tiny, sparse, denormal)]
    return laws


@pytest.fixture(params=["native", "torch", "double"])
def precision(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """fp32 rows through the kernels and through torch, and fp64 rows."""
    if request.param == "native" and loader.native_library() is None:
        pytest.skip("the kernels were not built")
    library = loader.native_library if request.param == "native" else lambda: None
    with mock.patch.object(loader, "native_library", library):
        yield torch.float64 if request.param == "double" else torch.float32


def test_argmax_is_that_of_the_whole_vocabulary(precision: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    for index, law in enumerate(adversarial_laws(rng)):
        p = law.to(precision)
        n = 40
        seeds = torch.from_numpy(rng.integers(-(2**63), 2**63, n))
        keys = row_keys(seeds, torch.full((n,), index), torch.arange(n))
        scores = p.double().log() + gumbels(keys, torch.arange(len(p), dtype=torch.int32)).double()
        best, winner = scores.max(-1)
        found = coupled_argmax(p.expand(n, -1), keys)
        assert found.dtype == torch.int64
        for row in (found != winner).nonzero()[:, 0]:  # never further off than rounding
            assert best[row] - scores[row, found[row]] < 1e-5


@pytest.mark.parametrize("vocab", [50, 5000, 50_000])
def test_the_unlikeliest_winner_is_found(vocab: int, precision: torch.dtype) -> None:
    """A key that gives one token the largest noise there is, and all the mass on the one with the least."""
    tokens = torch.arange(vocab, dtype=torch.int32)
    rng = np.random.default_rng(vocab)
    for _ in range(20):
        lucky = int(rng.integers(vocab))
        first = int(rng.integers(2**32))
        inner = int(noise._mix(signed([lucky ^ first]))[0])
        key = signed([first, (unmix(0) - inner) % 2**32])[None]
        g = gumbels(key, tokens)[0].double()
        assert int(g.argmax()) == lucky
        assert float(g[lucky]) > 22.87
        unlucky = int(g.argmin())
        gap = float(g[lucky] - g[unlucky])
        for ratio, winner in ((math.exp(-gap + 0.05), lucky), (math.exp(-gap - 0.05), unlucky)):
            p = torch.zeros(1, vocab, dtype=precision)
            p[0, unlucky], p[0, lucky] = 1.0, ratio
            assert coupled_argmax(p, key).tolist() == [winner]


def extreme_gumbels(low: int, high: int, vocab: int) -> torch.Tensor:
    """The smallest possible noise for one token, the largest for another, and nothing for the others."""
    with mock.patch.object(noise, "_mix", lambda x: x):
        ends = gumbels(torch.zeros(1, 2, dtype=torch.int32), torch.tensor([-1, 0], dtype=torch.int32))[0]
    g = torch.full((1, vocab), -2.0)
    g[0, low], g[0, high] = ends[0], ends[1]
    return g


@pytest.mark.parametrize("ratio", [1.0, 1e-3, 1e-9, 7.2e-12])
@pytest.mark.parametrize(("likely", "unlikely"), [(0, 9), (9, 0), (4, 5)])
def test_a_token_that_can_win_does(ratio: float, likely: int, unlikely: int) -> None:
    """The likeliest token with the smallest noise loses to one e^-25.6 times as likely with the largest."""
    law = torch.full((1, 10), 0.0, dtype=torch.float64)
    law[0, likely], law[0, unlikely] = 1.0, ratio
    g = extreme_gumbels(likely, unlikely, 10)
    with mock.patch.object(draws, "gumbels", lambda keys, tokens: g[:, tokens.long()]):
        assert coupled_argmax(law / law.sum(), torch.zeros(1, 2, dtype=torch.int32)).tolist() == [unlikely]


def test_a_token_that_cannot_win_is_below_what_noise_can_make_up() -> None:
    g = extreme_gumbels(0, 1, 2)[0].double()
    assert math.exp(float(g[0] - g[1])) > draws.HOPELESS


def test_ties_go_to_the_lowest_id() -> None:
    law = torch.tensor([[0.0, 0.25, 0.25, 0.5], [0.25, 0.25, 0.25, 0.25]])
    with mock.patch.object(
        draws, "gumbels", lambda keys, tokens: torch.zeros(1, len(tokens), dtype=torch.float32)
    ):
        assert coupled_argmax(law, torch.zeros(2, 2, dtype=torch.int32)).tolist() == [3, 0]


def test_argmax_of_a_row_does_not_depend_on_its_batch(precision: torch.dtype) -> None:
    rng = np.random.default_rng(3)
    p = torch.softmax(torch.from_numpy(rng.normal(size=(30, 500)) * 3), -1).to(precision)
    keys = row_keys(torch.arange(30), torch.zeros(30, dtype=torch.int64), torch.arange(30) * 7)
    together = coupled_argmax(p, keys)
    order = torch.from_numpy(rng.permutation(30))
    assert torch.equal(coupled_argmax(p[order], keys[order]), together[order])
    assert [int(coupled_argmax(p[i : i + 1], keys[i : i + 1])) for i in range(30)] == together.tolist()


# ---- the law


LAW = [0.4, 0.3, 0.15, 0.1, 0.04, 0.01]
ERROR_RATE = 1e-4


def winners(seeds: range, choice: int = 0, position: int = 5) -> np.ndarray:
    n = len(seeds)
    keys = row_keys(
        torch.arange(seeds.start, seeds.stop), torch.full((n,), choice), torch.full((n,), position)
    )
    return coupled_argmax(torch.tensor(LAW).expand(n, -1), keys).numpy()


def test_the_marginal_law_is_the_targets() -> None:
    n = 4000
    for choice, position in ((0, 5), (3, 100)):
        counts = np.bincount(winners(range(n), choice, position), minlength=6)
        assert stats.chisquare(counts, np.array(LAW) * n).pvalue > ERROR_RATE


def test_positions_choices_and_seeds_are_drawn_independently() -> None:
    n = 3000
    base = winners(range(n))
    others = [winners(range(n), position=6), winners(range(n), choice=1), winners(range(1, n + 1))]
    for other in others:
        table = np.zeros((6, 6))
        np.add.at(table, (base, other), 1)
        expected = np.outer(LAW, LAW) * n
        large = expected > 5
        seen = np.append(table[large], table[~large].sum())
        assert stats.chisquare(seen, np.append(expected[large], expected[~large].sum())).pvalue > ERROR_RATE


def test_the_processed_law_is_drawn_from() -> None:
    n = 2000
    logits = torch.tensor(LAW, dtype=torch.float64).log()
    params = SamplingParams(temperature=0.5, top_k=4)
    law = plain_law(logits.tolist(), params)
    p = probabilities(logits[None], [params]).expand(n, -1)
    keys = row_keys(torch.arange(n), torch.zeros(n, dtype=torch.int64), torch.full((n,), 77))
    counts = np.bincount(coupled_argmax(p, keys).numpy(), minlength=6)
    assert counts[4:].tolist() == [0, 0]
    assert stats.chisquare(counts[:4], np.array(law[:4]) * n).pvalue > ERROR_RATE
