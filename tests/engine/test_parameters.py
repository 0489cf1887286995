"""Every parameter of a request says the same with drafts, some accepted and some rejected, and without."""

from __future__ import annotations

import functools
from dataclasses import fields
from typing import Any

import pytest
import torch

from engine.grammar import Grammar
from engine.grammar_compiler import GrammarCompiler
from engine.params import SamplingParams
from tests.engine.harness import VOCAB, Engine, GuessDrafter, Output, one_thread, tiny  # noqa: F401

PROMPT = [3, 14, 15, 9, 26, 5, 35, 3, 14, 15, 9]
BASE: dict[str, Any] = {"seed": 11, "max_tokens": 40, "logprobs": 2, "ignore_eos": True}
TEXT = [bytes([97 + i % 26]) for i in range(VOCAB)]
#: hidden special tokens are for a vocabulary that has some: tests/server/test_streams.py
NAMES = [*(field.name for field in fields(SamplingParams) if field.name != "skip_special_tokens"), "grammar"]


@functools.cache
def grammar() -> Grammar:
    return GrammarCompiler(TEXT, frozenset({1})).compile("start: /([a-f][g-z]){9,12}/")


@functools.cache
def base() -> Output:
    return said({})[0]


def value(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The parameter with a value that matters, and what is to be set beside it so that it does."""
    plain = base()
    phrase, may_end = plain.text[20:23], {"ignore_eos": False, "logit_bias": {1: 5.0}}
    given: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.6,
        "top_k": 3,
        "min_p": 0.2,
        "presence_penalty": 2.0,
        "frequency_penalty": 1.0,
        "repetition_penalty": 1.6,
        "logit_bias": {plain.tokens[10]: -100.0, 7: 2.0},
        "allowed_token_ids": tuple(range(2, 60, 3)),
        "bad_words": ((plain.tokens[8],), *((a, b) for a in range(VOCAB) for b in range(a % 2, VOCAB, 2))),
        "min_tokens": 30,
        "max_tokens": 23,
        "stop": (phrase,),
        "stop_token_ids": (plain.tokens[25],),
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "seed": 12,
        "n": 3,
        "logprobs": 5,
        "prompt_logprobs": 1,
        "grammar": grammar(),
    }
    beside: dict[str, dict[str, Any]] = {
        "min_tokens": may_end,
        "ignore_eos": may_end,
        "include_stop_str_in_output": {"stop": (phrase,)},
    }
    return {name: given[name]}, beside.get(name, {})


def asked(params: dict[str, Any], drafter: GuessDrafter | None = None) -> tuple[list[Output], int, int]:
    """The choices of a request, and how many drafts were verified and accepted on the way."""
    engine = Engine(tiny(), drafter, "fixed:4" if drafter else "off", token_bytes=TEXT)
    active = engine.add("mine", PROMPT, **BASE | params)
    engine.run()
    return engine.outputs["mine"], active.usage.draft_tokens, active.usage.accepted_tokens


def said(params: dict[str, Any]) -> list[Output]:
    return asked(params)[0]


def half_right(texts: list[list[int]], seed: int) -> GuessDrafter:
    """Goes on as one of the texts for a while, and then anyhow."""
    generator = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    def guess(tokens: list[int], slots: int) -> list[int]:
        text = next((text for text in texts if text[: len(tokens)] == tokens), tokens)
        known = text[len(tokens) :][: below(slots + 1)]
        return known + [below(VOCAB) for _ in range(slots - len(known))]

    return GuessDrafter(guess)


def assert_same(one: list[Output], other: list[Output]) -> None:
    for a, b in zip(one, other, strict=True):
        assert (a.tokens, a.text, a.finish, a.reason) == (b.tokens, b.text, b.finish, b.reason)
        for mine, yours in ((a.logprobs, b.logprobs), (a.prompt_logprobs, b.prompt_logprobs)):
            for x, y in zip(mine, yours, strict=True):
                assert x.token_id == y.token_id
                assert x.logprob == pytest.approx(y.logprob, abs=1e-9)
                assert [token for token, _ in x.top] == [token for token, _ in y.top]


@pytest.mark.parametrize("how", ["seeded", "greedy"])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_change_nothing(name: str, how: str) -> None:
    given, beside = value(name)
    if how == "greedy":
        beside = beside | {"temperature": 0.0}
    plain = said(beside | given)
    if how == "seeded":
        assert plain != said(beside), "the parameter does nothing here"
    texts = [PROMPT + each.tokens for each in plain]
    drafted = accepted = 0
    for seed in range(3):
        outputs, verified, kept = asked(beside | given, half_right(texts, seed))
        assert_same(outputs, plain)
        drafted, accepted = drafted + verified, accepted + kept
    assert 0 < accepted < drafted


def test_all_at_once() -> None:
    given = [value(name)[0] for name in NAMES if name not in ("grammar", "ignore_eos", "stop_token_ids")]
    params = functools.reduce(lambda one, other: one | other, given) | {"min_tokens": 5, "ignore_eos": False}
    plain = said(params)
    outputs, drafted, accepted = asked(params, half_right([PROMPT + each.tokens for each in plain], 1))
    assert_same(outputs, plain)
    assert 0 < accepted < drafted
