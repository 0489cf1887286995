"""Texts keep to their grammar, and to the target's law under it, whatever is drafted."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.ngram import NgramDrafter
from engine.drafter import DraftRequest
from engine.grammar import Grammar, GrammarState
from engine.grammar_compiler import GrammarCompiler, GrammarError
from engine.params import SamplingParams
from engine.sampling import SamplingState
from tests.engine.enumerate import Enumeration, Text, World, total_variation
from tests.engine.harness import VOCAB, Engine, GuessDrafter, LawDrafter, babbler, one_thread, oracle, tiny  # noqa: F401
from tests.engine.plain_law import plain_law
from tests.engine.test_verification_exact import PROCESSORS, TOLERANCE, assert_lossless, assert_same

# ---- the masked law, by enumeration: 0 is "a", 1 is "b", 2 is "ab", 3 ends the text

PIECES = ("a", "b", "ab")
STOP = len(PIECES)
_COMPILER = GrammarCompiler([*(piece.encode() for piece in PIECES), b"<s>"], frozenset({STOP}))


@dataclass
class GrammarWorld(World):
    """A target whose texts are those of a finite `language`."""

    language: frozenset[str] = frozenset()
    stop_ids: frozenset[int] = frozenset({STOP})
    output: Text = (0,)

    def text(self, prefix: Text) -> str:
        return "".join(PIECES[token] if token < STOP else "?" for token in self.output + prefix)

    def logits(self, prefix: Text) -> list[float]:
        row = super().logits(prefix)
        return [0.5 if value == -np.inf else value for value in row]

    def allowed(self, prefix: Text) -> list[bool]:
        """What the language says, token by token: no library is asked."""
        if set(prefix) & self.stop_ids:
            return [True] * self.vocab
        text = self.text(prefix)
        return [
            text in self.language if token == STOP else token < STOP and self.begins(text + PIECES[token])
            for token in range(self.vocab)
        ]

    def begins(self, text: str) -> bool:
        return any(word.startswith(text) for word in self.language)

    def p(self, prefix: Text) -> list[float]:
        """The target's law, nothing but allowed tokens left."""
        if prefix not in self._p:
            allowed = self.allowed(prefix)
            row = [x if ok else -np.inf for x, ok in zip(self.logits(prefix), allowed, strict=True)]
            legal = all(self.allowed(prefix[:i])[token] for i, token in enumerate(prefix))
            legal = (
                legal and not any(self.closed(prefix[:i]) for i in range(len(prefix) + 1)) and any(allowed)
            )
            law = (
                plain_law(row, self.params, self.prompt, self.output + prefix, self.stop_ids) if legal else []
            )
            self._p[prefix] = law or [0.0] * self.vocab
        return self._p[prefix]

    def q(self, prefix: Text) -> list[float]:
        return (
            super().q(prefix)
            if any(self.p(prefix)) or self.drafter == "random"
            else [1.0, *[0.0] * (self.vocab - 1)]
        )

    def closed(self, text: Text) -> bool:
        if set(text) & self.stop_ids:
            return False
        said = self.text(text)
        return said in self.language and not any(w.startswith(said) and w != said for w in self.language)

    @cached_property
    def state(self) -> SamplingState:
        grammar = _COMPILER.compile("start: " + " | ".join(f'"{word}"' for word in sorted(self.language)))
        begun = grammar.begin(self.stop_ids, self.vocab)
        state = SamplingState(self.params, self.vocab, self.stop_ids, self.prompt, grammar=begun)
        for token in self.output:
            state.advance(token)
        return state


LANGUAGES = {
    "fixed": frozenset({"aabba"}),
    "open": frozenset({"a", "aa", "aab", "aabab", "ab", "abb", "abbaab"}),
    "short": frozenset({"a", "ab"}),
    "wide": frozenset("a" + "".join(tail) for n in range(7) for tail in itertools.product("ab", repeat=n)),
}
each_language = pytest.mark.parametrize("language", LANGUAGES.values(), ids=LANGUAGES.keys())


@each_language
@pytest.mark.parametrize("drafter", ["random", "processed", "unprocessed"])
@pytest.mark.parametrize("name", ["none", "filters", "all"])
def test_drawn_drafts_are_lossless_under_a_grammar(language: frozenset[str], drafter: str, name: str) -> None:
    assert_lossless(GrammarWorld(PROCESSORS[name], seed=3, drafter=drafter, language=language))


@each_language
@pytest.mark.parametrize("name", ["none", "all", "greedy"])
def test_every_deterministic_draft_is_lossless_under_a_grammar(language: frozenset[str], name: str) -> None:
    """Also drafts that leave the grammar, anywhere in the block."""
    world = GrammarWorld(PROCESSORS[name], seed=4, language=language)
    target = world.target_law()
    for law in Enumeration(world).emitted(list(itertools.product(world.blocks(), (0, 1, 2)))):
        assert_same(world.mixture([law], [1.0]), target)


def test_single_precision_and_the_kernels_are_lossless_under_a_grammar() -> None:
    for language in LANGUAGES.values():
        assert_lossless(GrammarWorld(PROCESSORS["filters"], seed=5, language=language), torch.float32)


def test_the_grammar_changes_the_law() -> None:
    for language in LANGUAGES.values():
        world = GrammarWorld(SamplingParams(), seed=3, language=language)
        bare = World(SamplingParams(), seed=3, stop_ids=world.stop_ids, output=world.output)
        assert total_variation(world.target_law(), bare.target_law()) > 0.02


def measured(world: World) -> float:
    law = Enumeration(world, grid=4).law(lambda _: world.gamma)
    return total_variation(law, world.target_law())


def test_a_mask_that_does_not_follow_the_drafts_fails() -> None:
    world = GrammarWorld(SamplingParams(), seed=3, drafter="processed", language=LANGUAGES["open"])
    assert measured(world) <= TOLERANCE
    assert world.state.generated == 1
    with mock.patch.object(GrammarState, "advance"), pytest.raises(AssertionError):
        assert measured(world) <= TOLERANCE


def test_a_drawn_block_that_is_cut_where_it_leaves_the_grammar_fails() -> None:
    """Whether a drawn token is verified must not depend on it: so illegal ones are left to be rejected."""
    world = GrammarWorld(SamplingParams(), seed=3, language=LANGUAGES["open"])

    def legal(tokens: Text) -> int:
        return next((i for i in range(len(tokens)) if not world.allowed(tokens[:i])[tokens[i]]), len(tokens))

    cut = Enumeration(world).law(legal)
    assert total_variation(cut, world.target_law()) > 0.01


# ---- where a text stands

LETTERS = [bytes([byte]) for byte in range(32, 127)]
WORDS = [
    *LETTERS,
    b"\n",
    b'{"',
    b'": ',
    b'", "',
    b"true",
    b'"}',
    b"12",
    "é".encode()[:1],
    "é".encode()[1:],
    b"",
    b"<end>",
    b"<t>",
]
END, MARK = len(WORDS) - 2, len(WORDS) - 1
COMPILER = GrammarCompiler(WORDS, frozenset({END, MARK}))
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["ann", "bo"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}  # fmt: skip
JSON = "start: %json " + json.dumps(SCHEMA | {"x-guidance": {"whitespace_pattern": " "}})


def begin(source: str, stop_ids: Sequence[int] = (END,), vocab: int = len(WORDS)) -> GrammarState:
    return COMPILER.compile(source).begin(stop_ids, vocab)


def allowed(state: GrammarState) -> set[int]:
    return set((~state.forbidden()).nonzero()[:, 0].tolist())


def spell(text: str) -> list[int]:
    return [WORDS.index(bytes([byte])) for byte in text.encode()]


def test_tokens_are_judged_by_their_bytes() -> None:
    state = begin('start: "{\\"é" /[0-9]+/ "}"')
    assert {WORDS[token] for token in allowed(state)} == {b"{", b'{"'}
    state.advance(WORDS.index(b'{"'))
    assert {WORDS[token] for token in allowed(state)} == {"é".encode()[:1]}
    state.advance(WORDS.index("é".encode()[:1]))
    state.advance(WORDS.index("é".encode()[1:]))
    assert {WORDS[token] for token in allowed(state)} == {*(b"%d" % digit for digit in range(10)), b"12"}


def test_stop_tokens_are_allowed_exactly_where_the_text_may_end() -> None:
    stop_a = WORDS.index(b"a")  # a token of the text may be a stop token as well
    state = begin("start: /[a-c]{2,3}/", [END, stop_a])
    b = WORDS.index(b"b")
    assert allowed(state) == {b, b + 1}
    state.advance(b)
    assert allowed(state) == {b, b + 1}
    state.advance(b)
    assert allowed(state) == {b, b + 1, END, stop_a}
    assert not state.ended
    state.advance(b)
    assert state.ended
    assert allowed(state) == {END, stop_a}


def test_special_tokens_belong_only_where_they_are_named() -> None:
    assert MARK not in allowed(begin("start: /(.|\\n)*/"))
    assert allowed(begin('start: "<t>"')) == {WORDS.index(b"<")}
    state = begin(f"start: <[{MARK}]> /b/")
    assert allowed(state) == {MARK}
    state.advance(MARK)
    assert allowed(state) == {WORDS.index(b"b")}


def test_rows_of_a_padded_vocabulary_say_nothing() -> None:
    state = begin("start: /(.|\\n)*/", vocab=len(WORDS) + 5)
    assert not allowed(state) & set(range(len(WORDS), len(WORDS) + 5))
    state.advance(len(WORDS) + 2)
    assert not allowed(state)


def test_nothing_follows_a_forbidden_token() -> None:
    state = begin("start: /a+/")
    state.advance(WORDS.index(b"b"))
    assert allowed(state) == set()
    assert not state.ended
    assert state.legal([WORDS.index(b"a")]) == 0
    state.advance(WORDS.index(b"a"))
    assert allowed(state) == set()


def test_legal_counts_up_to_the_first_token_that_may_not_follow() -> None:
    state = begin(JSON)
    for text, count in (('{"name": "bo"', 13), ('{"nama": "bo"', 5), ("x", 0), ("", 0)):
        assert state.legal(spell(text)) == count
    assert state.legal([*spell('{"name"'), END, *spell(":")]) == 7
    assert allowed(state) == allowed(begin(JSON)), "asking moved it"


def random_text(state: GrammarState, rng: random.Random) -> list[int]:
    """A walk to the end."""
    tokens: list[int] = []
    while not state.ended:
        token = rng.choice(sorted(allowed(state)))
        tokens.append(token)
        if token == END:
            return tokens
        state.advance(token)
    return tokens


def text_of(tokens: Sequence[int]) -> str:
    return b"".join(WORDS[token] for token in tokens if token != END).decode()


@given(st.integers(0, 2**32))
def test_every_walk_is_a_text_of_the_grammar(seed: int) -> None:
    value = json.loads(text_of(random_text(begin(JSON), random.Random(seed))))
    assert value["name"] in ("ann", "bo")
    assert 0 <= value["age"] <= 130
    assert type(value["ok"]) is bool


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32))
def test_forks_run_ahead_and_leave_no_trace(seed: int) -> None:
    """Drafts that are accepted, rejected, illegal, and looked at twice: always what a fresh walk says."""
    rng = random.Random(seed)
    state, said = begin(JSON), list[int]()

    def fresh(tokens: Sequence[int]) -> set[int]:
        other = begin(JSON)
        for token in tokens:
            other.advance(token)
        return allowed(other)

    while not state.ended:
        fork, drafts = state.fork(), list[int]()
        for _ in range(rng.randrange(4)):
            legal = sorted(allowed(fork))
            if not legal or fork.ended:
                break
            assert set(legal) == fresh(said + drafts)
            drafts.append(rng.choice(legal) if rng.random() < 0.8 else rng.randrange(len(WORDS)))
            fork.advance(drafts[-1])
        for token in [*drafts[: rng.randrange(len(drafts) + 1)], -1]:
            legal = sorted(allowed(state))
            assert set(legal) == fresh(said)
            token = token if token in legal else rng.choice(legal)
            if token == END:
                return
            state.advance(token)
            said.append(token)
            if state.ended:
                break
    json.loads(text_of(said))


# ---- compiling


@pytest.mark.parametrize(
    "source", ["start: no_such_rule", "nonsense", "start: /(/", 'start: %json {"type": "what"}', ""]
)
def test_what_does_not_compile_is_refused(source: str) -> None:
    with pytest.raises(GrammarError):
        COMPILER.compile(source)


@pytest.mark.parametrize(
    "source",
    [
        "start: /((a{1,900}){1,900}){1,900}/",
        "start: /" + "(a|b)*" * 60 + "a(a|b){400}/",
        "start: %json " + json.dumps({"type": "array", "minItems": 10**7, "items": {"type": "integer"}}),
        "start: %json " + json.dumps({"type": "string", "pattern": "^(([a-z]+)+[0-9]{1,5000}){1,5000}$"}),
        'start: "' + "a" * (1 << 19) + '"',
    ],
    ids=["nested", "backtracking", "items", "pattern", "long"],
)
@pytest.mark.timeout(20)
def test_what_is_too_complex_is_refused_or_ends_soon(source: str) -> None:
    """Limits count work, not time; a grammar that slips through may still fail while it is followed."""
    try:
        state = begin(source)
    except GrammarError:
        return
    for _ in range(20):
        legal = allowed(state)
        if not legal:
            return
        state.advance(min(legal))


def test_a_grammar_is_compiled_once() -> None:
    compiler = GrammarCompiler(WORDS, frozenset({END}))
    assert compiler.compile("start: /a/") is compiler.compile("start: /a/")
    assert compiler.compile("start: /b/") is not compiler.compile("start: /a/")


# ---- drafts that are looked up


def test_looked_up_drafts_are_cut_where_they_leave_the_grammar() -> None:
    said = spell('{"name": "bo", "age": 7, "name": "bo", "ag')
    state = SamplingState(SamplingParams(), len(WORDS), frozenset({END}), grammar=begin("start: /[^7]*/"))
    request = DraftRequest(0, np.array(said, np.int32), 8, 0, np.zeros(1, np.int32), state)
    (block,) = NgramDrafter().draft([request])
    assert block is not None
    assert text_of(block.tokens) == 'e": '


def test_what_the_grammar_forces_is_drafted() -> None:
    encode = {'name": ': [*spell("name"), WORDS.index(b'": ')]}.get
    compiler = GrammarCompiler(WORDS, frozenset({END}), lambda text: list(encode(text) or ()))
    begun = compiler.compile('start: "{\\"" "name\\": " /[0-9]+/').begin([END], len(WORDS))
    state = SamplingState(SamplingParams(), len(WORDS), frozenset({END}), grammar=begun)
    said = spell('{"nope {"')
    for token in spell('{"'):
        state.advance(token)
    request = DraftRequest(0, np.array(said, np.int32), 3, 0, np.zeros(1, np.int32), state)
    (block,) = NgramDrafter().draft([request])
    assert block is not None
    assert text_of(block.tokens) == "nam"
    assert min(block.chances or ()) > 0.8
    assert allowed(begun) == {WORDS.index(b"n")}, "asking moved it"


# ---- in the engine

ENGINE_WORDS = [
    *(bytes([byte]) for byte in b'{}[]":, \n0123456789abcdefghijklmnorstuy_-.'),
    *(
        b'{"',
        b'": ',
        b'", "',
        b"true",
        b"false",
        b'"}',
        b"name",
        b"age",
        b"ann",
        b"bo",
        b', "',
        b"12",
        b'": "',
    ),
]
ENGINE_WORDS = [b"", b"", *ENGINE_WORDS]  # 0 says nothing, 1 is the end
ENGINE_WORDS += [b""] * (VOCAB - len(ENGINE_WORDS))


def grammars() -> list[Grammar]:
    compiler = GrammarCompiler(ENGINE_WORDS, frozenset({1}))
    choice = 'start: "ann" | "bo" | "true" | "abacus"'
    return [compiler.compile(JSON), compiler.compile("start: /[a-c]{3,9}(12)*/"), compiler.compile(choice)]


CHECKS = (
    lambda text: json.loads(text)["name"] in ("ann", "bo"),
    lambda text: re.fullmatch("[a-c]{3,9}(12)*", text) is not None,
    lambda text: text in ("ann", "bo", "true", "abacus"),
)


def run(
    drafter: Any, policy: str, count: int = 18, **options: Any
) -> dict[str, tuple[str, str | None, list[int]]]:
    """Requests of every kind at once, each with a grammar: {name: (text, finish, tokens)}"""
    engine = Engine(tiny(), drafter, policy, token_bytes=ENGINE_WORDS, max_sequences=8, **options)
    made = grammars()
    for i in range(count):
        how: dict[str, Any] = [{"temperature": 0.0}, {"seed": i}, {}][i // 3 % 3]
        how = how | [{}, {"presence_penalty": 0.5, "top_p": 0.9}][i % 2]
        engine.add(f"r{i}", [2, 5 + i % 20, 7], grammar=made[i % 3], max_tokens=110, **how)
    engine.run()
    return {name: (out.text, out.finish, out.tokens) for name, (out,) in engine.outputs.items()}


DRAFTERS = {
    "none": lambda: None,
    "babbler": lambda: babbler(3),
    "lookup": NgramDrafter,
    "law": lambda: LawDrafter(torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))),
    "illegal": lambda: GuessDrafter(lambda tokens, slots: [0] * slots),
}


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS.keys())
@pytest.mark.parametrize("pages", [400, 70])
def test_all_texts_conform_under_load(drafter: Any, pages: int) -> None:
    """With 70 pages sequences are preempted, blocks that wait are dropped with them."""
    for name, (text, finish, _) in run(drafter(), "fixed:4", num_pages=pages).items():
        assert finish == "stop"
        assert CHECKS[int(name[1:]) % 3](text), text


def test_greedy_and_seeded_texts_do_not_depend_on_drafts() -> None:
    plain = run(None, "off")
    texts = [[2, 5 + i % 20, 7, *plain[f"r{i}"][2]] for i in range(18)]
    for drafter in (babbler(5), oracle(*texts), NgramDrafter()):
        drafted = run(drafter, "fixed:5")
        for i in range(18):
            if i // 3 % 3 != 2:
                assert drafted[f"r{i}"] == plain[f"r{i}"]


def test_choices_of_one_request_have_a_grammar_each() -> None:
    engine = Engine(tiny(), babbler(1), "fixed:3", token_bytes=ENGINE_WORDS)
    engine.add("r", [2, 9], grammar=grammars()[0], n=4, max_tokens=110)
    engine.run()
    assert all(CHECKS[0](out.text) for out in engine.outputs["r"])
    assert len({out.text for out in engine.outputs["r"]}) > 1


def test_a_text_ends_with_its_grammar_whatever_the_stop_tokens() -> None:
    engine = Engine(tiny(), None, "off", token_bytes=ENGINE_WORDS)
    grammar = grammars()[2]
    engine.add("ignoring", [2, 9], grammar=grammar, ignore_eos=True, max_tokens=50)
    engine.add("long", [2, 9], grammar=grammar, min_tokens=40, max_tokens=50)
    engine.run()
    for name in ("ignoring", "long"):
        (out,) = engine.outputs[name]
        assert out.finish == "stop"
        assert CHECKS[2](out.text)


def test_a_row_without_a_legal_token_fails_that_request_only() -> None:
    engine = Engine(tiny(), babbler(2), "fixed:3", token_bytes=ENGINE_WORDS)
    compiler = GrammarCompiler(ENGINE_WORDS, frozenset({1}))
    engine.add("stuck", [2, 9], grammar=compiler.compile('start: "ann" "Z"'), max_tokens=50)
    engine.add("fine", [2, 9], grammar=grammars()[2], max_tokens=50)
    engine.run()
    (stuck,), (fine,) = engine.outputs["stuck"], engine.outputs["fine"]
    assert stuck.finish == "error"
    assert "leaves no token" in stuck.error
    assert CHECKS[2](fine.text)
