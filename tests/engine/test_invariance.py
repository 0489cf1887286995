"""A seeded or greedy text is a function of the request alone; an unseeded one keeps its law."""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from drafters.ngram import NgramDrafter
from engine.drafter import Drafter
from engine.params import SamplingParams
from engine.sampling import probabilities
from tests.engine.harness import (
    VOCAB,
    Engine,
    LawDrafter,
    Output,
    babbler,
    one_thread,  # noqa: F401
    oracle,
    reference,
    tiny,
)

PROMPT = [3, 14, 15, 9, 26, 5, 35, 3, 14, 15, 9]
LENGTH = 24

PARAMS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "greedy, penalties": {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    "greedy, bias": {"temperature": 0.0, "logit_bias": {7: 3.0, 11: -100.0}, "frequency_penalty": 0.8},
    "plain": {"seed": 1},
    "cold": {"seed": 2, "temperature": 0.3},
    "hot": {"seed": -3, "temperature": 1.9},
    "top-k": {"seed": 4, "top_k": 5},
    "top-p": {"seed": 5, "top_p": 0.7},
    "min-p": {"seed": 6, "min_p": 0.2},
    "filters": {"seed": 7, "temperature": 1.4, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "presence": {"seed": 8, "presence_penalty": 1.2},
    "frequency": {"seed": 9, "frequency_penalty": -1.5},
    "repetition": {"seed": 10, "repetition_penalty": 1.8},
    "bias": {"seed": 11, "logit_bias": {1: 4.0, 20: 2.5, 21: -100.0}},
    "minimum": {"seed": 12, "min_tokens": 16, "logit_bias": {1: 6.0}},
    "stops": {"seed": 13, "stop_token_ids": (30, 31), "ignore_eos": True, "stop": ("az", "qq")},
    "shown stops": {
        "seed": 13,
        "stop_token_ids": (30, 31),
        "stop": ("az", "qq"),
        "include_stop_str_in_output": True,
    },
    "allowed": {"seed": 14, "allowed_token_ids": tuple(range(2, 40, 3))},
    "bad words": {
        "seed": 15,
        "bad_words": ((20,), (3, 14), (26, 5, 35), *((a, b) for a in range(8) for b in range(30))),
    },
    "everything": {
        "seed": 2**62 + 5,
        "temperature": 1.2,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.1,
        "logit_bias": {9: 1.0, 33: -2.0},
        "min_tokens": 6,
        "stop_token_ids": (2,),
        "n": 3,
        "bad_words": ((11,), (9, 12)),
        "allowed_token_ids": tuple(range(1, 60)),
    },
}


def add(engine: Engine, name: str) -> Any:
    return engine.add("mine", PROMPT, max_tokens=LENGTH, **PARAMS[name])


@functools.cache
def alone(name: str) -> list[Output]:
    """The request by itself, without speculation."""
    engine = Engine(tiny())
    add(engine, name)
    engine.run()
    return engine.outputs["mine"]


def law_drafter() -> LawDrafter:
    return LawDrafter(2.0 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3)))


def drafters(name: str) -> list[Drafter]:
    """The oracle knows the text, so that whole blocks are accepted."""
    know = oracle(*(PROMPT + output.tokens for output in alone(name)))
    return [NgramDrafter(1, 3), know, law_drafter()]


def noise(engine: Engine, count: int) -> None:
    """Other requests, of every kind and length, that share the beginning of the prompt."""
    rng = np.random.default_rng(5)
    for i in range(count):
        text = PROMPT[: int(rng.integers(1, len(PROMPT)))] + rng.integers(3, VOCAB, 1 + i).tolist()
        kind = [{"seed": i}, {"temperature": 0.0}, {}, {"top_k": 3, "presence_penalty": 1.0}][i % 4]
        engine.add(f"other {i}", text, max_tokens=int(rng.integers(4, 24)), ignore_eos=True, **kind)


@pytest.fixture(params=PARAMS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_with_any_drafter(name):
    for drafter in drafters(name):
        engine = Engine(tiny(), drafter, "fixed:4")
        active = add(engine, name)
        engine.run()
        assert engine.outputs["mine"] == alone(name), drafter.name
        assert active.usage.draft_tokens > 0 or drafter.name == "ngram"


def test_with_any_page_size_token_budget_and_length_of_draft(name):
    for page_size, budget, policy in (
        (1, 64, "fixed:7"),
        (16, 7, "fixed:2"),
        (5, 4, "fixed:1"),
    ):
        engine = Engine(
            tiny(),
            babbler(2),
            policy,
            num_pages=400 // page_size,
            page_size=page_size,
            token_budget=budget,
            max_sequences=min(budget, 16),
        )
        add(engine, name)
        engine.run()
        assert engine.outputs["mine"] == alone(name)


def test_among_sixteen_others(name):
    engine = Engine(tiny(), drafters(name)[-1], "fixed:3", num_pages=400, max_sequences=24, token_budget=400)
    noise(engine, 8)
    add(engine, name)
    engine.add("late", PROMPT, max_tokens=LENGTH, n=8, ignore_eos=True)
    engine.step()
    engine.step()
    assert len(engine.loop.running) >= 16
    engine.run()
    assert engine.outputs["mine"] == alone(name)


@pytest.mark.parametrize("policy", ["off", "fixed:4"])
def test_after_preemptions(name, policy):
    engine = Engine(
        tiny(),
        oracle(*(PROMPT + output.tokens for output in alone(name))),
        policy,
        num_pages=17,
        max_model_len=68,
    )
    for i in range(3):
        engine.add(f"other {i}", [40 + i, 3, 4], max_tokens=30, ignore_eos=True, seed=i)
    active = add(engine, name)
    engine.run()
    if len(alone(name)[0].tokens) > 20:
        assert active.preemptions > 0, "the pool is too large to test anything"
    assert engine.outputs["mine"] == alone(name)


def test_most_texts_are_long_enough_to_be_preempted():
    assert sum(len(alone(name)[0].tokens) > 20 for name in PARAMS) >= len(PARAMS) * 2 // 3


def test_choices_and_seeds_differ_and_neighbouring_ones_share_nothing():
    engine = Engine(tiny())
    for seed in (5, 6):
        engine.add(f"{seed}", PROMPT, max_tokens=LENGTH, seed=seed, n=3, ignore_eos=True)
    engine.run()
    texts = [tuple(output.tokens) for outputs in engine.outputs.values() for output in outputs]
    assert len(set(texts)) == 6


def test_unseeded_requests_differ_although_all_else_is_equal():
    engine = Engine(tiny())
    for name in "ab":
        engine.add(name, PROMPT, max_tokens=LENGTH, ignore_eos=True)
    engine.run()
    assert engine.texts()["a"] != engine.texts()["b"]


# ---- the law of unseeded texts: a smoke test; the proof is by enumeration (test_verification_exact.py)

TOKENS = 4  # of output: the first comes with the prompt, and then up to two drafts and one more
RUNS = 1600
LAWS: dict[str, dict[str, Any]] = {
    "filtered": {"top_k": 3},
    "penalised": {"top_k": 3, "temperature": 1.3, "presence_penalty": 1.5, "repetition_penalty": 1.4},
}


def exact_law(params: SamplingParams) -> dict[tuple[int, ...], float]:
    """The probability of every output, token by token over the transformers model."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        texts = list(law)
        ids = torch.tensor([[*PROMPT, *text] for text in texts])
        with torch.no_grad():
            rows = reference()(ids).logits[:, -1]
        grown = {}
        for text, row in zip(texts, rows, strict=True):
            seen = torch.zeros(VOCAB, dtype=torch.bool)
            seen[[*PROMPT, *text]] = True
            scale = params.repetition_penalty
            row = torch.where(seen, torch.where(row > 0, row / scale, row * scale), row)
            for token in set(text):
                row[token] -= params.presence_penalty
            p = probabilities(row[None], [params])[0]
            for token in p.nonzero()[:, 0].tolist():
                grown[*text, token] = law[text] * float(p[token])
        law = grown
    return law


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "speculation"), [("filtered", False), ("filtered", True), ("penalised", True)]
)
def test_the_law_of_unseeded_texts_is_the_models_with_and_without_a_drafter(kind, speculation):
    law = exact_law(SamplingParams(**LAWS[kind]))
    engine = Engine(
        tiny(),
        contrary_drafter(law) if speculation else None,
        "fixed:4" if speculation else "off",
        num_pages=3000,
        max_sequences=500,
        token_budget=2000,
    )
    active = [
        engine.add(f"{i}", PROMPT, n=100, max_tokens=TOKENS, ignore_eos=True, **LAWS[kind])
        for i in range(RUNS // 100)
    ]
    engine.run()
    counts = Counter(tuple(output.tokens) for outputs in engine.outputs.values() for output in outputs)
    assert counts.total() == RUNS
    assert set(counts) <= set(law)
    drafted = sum(each.usage.draft_tokens for each in active)
    accepted = sum(each.usage.accepted_tokens for each in active)
    if speculation:
        assert 0.2 < accepted / drafted < 0.9, "both branches of the rejection must count"

    # Outputs expected fewer than five times go together.
    common = [text for text, p in law.items() if p * RUNS >= 5]
    observed = np.array([counts[text] for text in common])
    expected = np.array([law[text] * RUNS for text in common])
    observed = np.append(observed, RUNS - observed.sum())
    expected = np.append(expected, RUNS - expected.sum())
    keep = expected > 1e-6
    statistic = float((((observed - expected) ** 2)[keep] / expected[keep]).sum())
    assert len(common) > 15
    assert statistic < chi2.ppf(1 - 1e-4, int(keep.sum()) - 1)


def contrary_drafter(law: dict[tuple[int, ...], float]) -> LawDrafter:
    """Knows which tokens may follow which, and prefers the less likely ones."""
    table = torch.full((VOCAB, VOCAB), -12.0)
    for text, p in law.items():
        for before, token in itertools.pairwise(text):
            table[before, token] = -0.5 * math.log(p)
    return LawDrafter(table)
