"""Tokens to text: bytes, stop strings and ends, however the text is cut into tokens and steps."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine.batch import Verdict
from engine.emission import emit
from engine.outputs import TokenLogprob
from engine.params import SamplingParams
from engine.sampling import SamplingState
from engine.sequence import Sequence
from engine.text import TextStream
from tests.engine.harness import VOCAB, Engine, one_thread, oracle, tiny  # noqa: F401

# Any bytes, and pieces of real characters of one to four bytes.
PIECE = st.one_of(
    st.binary(max_size=4),
    st.text(max_size=3).map(lambda text: text.encode("utf-8", "surrogatepass")),
    st.sampled_from("aé€😀\u0301".encode()).map(lambda byte: bytes([byte])),
)


@given(st.lists(PIECE, max_size=20), st.sets(st.integers(0, 19)))
@example([b"\xf0\x9f", b"\x98", b"\x80"], set())
@example([b"\xe2\x82", b"a"], set())
@example([b"\xc3"], {0})
@settings(max_examples=250, deadline=None)
def test_streamed_text_is_the_bytes_decoded_at_once(pieces, skipped):
    """Special tokens contribute nothing, not even an end to half a character."""
    stream = TextStream(pieces, frozenset(skipped))
    text = "".join(stream.push(token) for token in range(len(pieces))) + stream.finish()
    kept = b"".join(piece for token, piece in enumerate(pieces) if token not in skipped)
    assert text == kept.decode(errors="replace")


def test_half_a_character_waits_for_its_other_half():
    stream = TextStream(["€".encode()[:1], "€".encode()[1:] + b"a"])
    assert stream.push(0) == ""
    assert stream.push(1) == "€a"


# ---- stop strings


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """The text before the first stop string to be complete, and that stop string."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def open_tail(text: str, stops: tuple[str, ...]) -> str:
    """The longest end of a text that is a proper prefix of a stop string."""
    tails = (text[at:] for at in range(len(text)))
    return next((tail for tail in tails if any(s.startswith(tail) and s != tail for s in stops)), "")


LETTERS = st.text(alphabet="abé", max_size=14)
STOPS = st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=4).map(tuple)


@given(LETTERS, STOPS, st.lists(st.integers(0, 28)))
@example("abab", ("ba", "abab"), [4])
@example("aab", ("ab", "b"), [])
@example("aé", ("é",), [2])
@settings(max_examples=600, deadline=None)
def test_a_text_ends_before_the_first_stop_string_however_it_is_cut(text, stops, cuts):
    raw = text.encode()
    edges = sorted({0, len(raw), *(at for at in cuts if at <= len(raw))})
    pieces = [raw[a:b] for a, b in pairwise(edges)]
    stream = TextStream(pieces, stop=stops)
    wanted, stop = cut(text, stops)
    given_out = ""
    for token in range(len(pieces)):
        given_out += stream.push(token)
        if stream.stopped_by is not None:
            break
        seen = b"".join(pieces[: token + 1]).decode(errors="ignore")
        assert given_out == seen[: len(seen) - len(open_tail(seen, stops))], "held back more than needed"
    given_out += stream.finish()
    assert (given_out, stream.stopped_by) == (wanted, stop)
    assert stream.finish() == "", "nothing comes twice"


def test_nothing_is_held_back_that_cannot_become_a_stop_string():
    stream = TextStream([b"ab", b"x", b"a", b"b", b"c"], stop=("abc",))
    assert [stream.push(token) for token in range(5)] == ["", "abx", "", "", ""]
    assert stream.stopped_by == "abc"


def test_the_first_tokens_stop_nothing():
    stream = TextStream([b"a", b"b"], stop=("ab", "b"), free=3)
    assert [stream.push(token) for token in (0, 1, 1)] == ["a", "b", "b"]
    assert stream.push(0) == ""
    assert (stream.push(1), stream.stopped_by) == ("", "ab")


def test_what_was_held_back_is_released_at_the_end():
    stream = TextStream([b"xab"], stop=("abc",))
    assert stream.push(0) == "x"
    assert stream.finish() == "ab"


@given(LETTERS, STOPS, st.lists(st.integers(0, 28)))
@settings(max_examples=200, deadline=None)
def test_the_stop_string_itself_is_kept_on_request(text, stops, cuts):
    raw = text.encode()
    edges = sorted({0, len(raw), *(at for at in cuts if at <= len(raw))})
    pieces = [raw[a:b] for a, b in pairwise(edges)]
    stream = TextStream(pieces, stop=stops, include=True)
    wanted, stop = cut(text, stops)
    given_out = "".join(stream.push(token) for token in range(len(pieces)) if stream.stopped_by is None)
    assert given_out + stream.finish() == wanted + (stop or "")
    assert stream.stopped_by == stop


# ---- from verdicts to pieces of output

LETTER_BYTES = [bytes([97 + i]) for i in range(26)]


def sequence(stop: tuple[str, ...] = ()) -> Sequence:
    state = SamplingState(SamplingParams(stop=stop), 26, frozenset())
    return Sequence(0, 0, np.asarray([0], dtype=np.int32), state, TextStream(LETTER_BYTES, stop=stop), "")


def verdict(word: str, **fields) -> Verdict:
    tokens = tuple(ord(letter) - 97 for letter in word)
    return Verdict(tokens, len(tokens) - 1, tuple(TokenLogprob(t, -1.0) for t in tokens), **fields)


def spell(tokens: tuple[int, ...]) -> str:
    return "".join(chr(97 + token) for token in tokens)


def test_tokens_and_logprobs_behind_a_stop_string_are_cut_off():
    for word in ("abcdef", "abcd"):
        piece = emit(sequence(("cd",)), 0, verdict(word), frozenset())
        assert (piece.text, spell(piece.tokens)) == ("ab", "abcd")
        assert [each.token_id for each in piece.logprobs] == list(piece.tokens)
        assert (piece.finish, piece.reason) == ("stop", "cd")


def test_a_stop_string_across_steps_keeps_what_was_streamed():
    stream = sequence(("cd",))
    first, second = emit(stream, 0, verdict("abc"), frozenset()), emit(stream, 0, verdict("dz"), frozenset())
    assert (first.text, first.finish, spell(first.tokens)) == ("ab", None, "abc")
    assert (second.text, second.finish, spell(second.tokens)) == ("", "stop", "d")


@pytest.mark.parametrize(("eos", "reason"), [(frozenset({25}), None), (frozenset(), 25)])
def test_a_stop_token_counts_but_is_not_part_of_the_text(eos, reason):
    piece = emit(sequence(), 0, verdict("abz", finish="stop", stop_token=25), eos)
    assert (piece.text, spell(piece.tokens), len(piece.logprobs)) == ("ab", "abz", 3)
    assert (piece.finish, piece.reason) == ("stop", reason)


def test_a_stop_token_is_part_of_the_text_on_request():
    asking = sequence()
    asking.state.params = SamplingParams(include_stop_str_in_output=True)
    piece = emit(asking, 0, verdict("abz", finish="stop", stop_token=25), frozenset())
    assert (piece.text, spell(piece.tokens)) == ("abz", "abz")
    assert (piece.finish, piece.reason) == ("stop", 25)


def test_a_stop_token_releases_what_was_held_back():
    piece = emit(sequence(("bz",)), 0, verdict("abz", finish="stop", stop_token=25), frozenset())
    assert (piece.text, piece.finish, piece.reason) == ("ab", "stop", 25)


@pytest.mark.parametrize("finish", ["length", "stop"])
def test_a_stop_string_beats_an_end_further_on(finish):
    stop_token = 25 if finish == "stop" else None
    piece = emit(sequence(("b",)), 0, verdict("abcz", finish=finish, stop_token=stop_token), frozenset({25}))
    assert (piece.text, spell(piece.tokens)) == ("a", "ab")
    assert (piece.finish, piece.reason) == ("stop", "b")


def test_a_length_limit_reached_with_the_last_letter_of_a_stop_string_is_a_stop():
    piece = emit(sequence(("bc",)), 0, verdict("abc", finish="length"), frozenset())
    assert (piece.text, piece.finish, piece.reason) == ("a", "stop", "bc")


def test_a_length_limit_releases_half_a_stop_string_and_half_a_character():
    stream = sequence(("bx",))
    piece = emit(stream, 0, verdict("ab", finish="length"), frozenset())
    assert (piece.text, piece.finish, piece.reason) == ("ab", "length", None)
    half = Sequence(0, 0, np.zeros(1, np.int32), stream.state, TextStream([b"a", b"\xe2\x82"]), "")
    assert emit(half, 0, Verdict((0, 1), finish="length"), frozenset()).text == "a\ufffd"


# ---- the same through the engine, at each place in a drafted block

GAMMA = 4
PROMPT = [3, 14, 15, 9, 26]


@pytest.fixture(scope="module")
def text() -> list[int]:
    """A greedy text whose first tokens all differ, so that each of them can end it."""
    engine = Engine(tiny())
    engine.add("a", PROMPT, temperature=0.0, max_tokens=24, ignore_eos=True)
    engine.run()
    tokens = engine.outputs["a"][0].tokens
    assert len(set(tokens[: 2 * GAMMA])) == 2 * GAMMA, "choose another prompt"
    return tokens


def drafting(text: list[int], **options) -> Engine:
    return Engine(tiny(), oracle(PROMPT + text), f"fixed:{GAMMA}", **options)


@pytest.mark.parametrize("place", range(2 * GAMMA))
@pytest.mark.parametrize("how", ["eos", "stop_token"])
def test_a_stop_token_ends_the_text_at_each_place_in_a_block(text, place, how):
    end = text[place]
    engine = drafting(text, eos=(end,) if how == "eos" else (1,))
    active = engine.add(
        "a",
        PROMPT,
        temperature=0.0,
        max_tokens=24,
        logprobs=0,
        stop_token_ids=(end,) if how == "stop_token" else (),
    )
    engine.run()
    output = engine.outputs["a"][0]
    assert output.tokens == text[: place + 1]
    assert len(output.text) == place
    assert [each.token_id for each in output.logprobs] == output.tokens
    assert (output.finish, output.reason) == ("stop", None if how == "eos" else end)
    assert active.usage.completion_tokens == place + 1
    assert active.usage.accepted_tokens <= active.usage.draft_tokens
    # The first token comes with the prompt; the rest in blocks of accepted drafts and one more.
    assert engine.steps <= 1 + -(-place // (GAMMA + 1))


@pytest.mark.parametrize("max_tokens", range(1, GAMMA + 3))
def test_a_length_limit_ends_the_text_at_each_place_in_a_block(text, max_tokens):
    engine = drafting(text)
    active = engine.add("a", PROMPT, temperature=0.0, max_tokens=max_tokens, logprobs=0, ignore_eos=True)
    engine.run()
    output = engine.outputs["a"][0]
    assert output.tokens == text[:max_tokens]
    assert len(output.logprobs) == len(output.text) == max_tokens
    assert (output.finish, output.reason) == ("length", None)
    assert active.usage.completion_tokens == max_tokens
    # Never more drafts than could be emitted together with the token after them.
    assert active.usage.draft_tokens == active.usage.accepted_tokens == max(0, min(max_tokens - 2, GAMMA))


@pytest.mark.parametrize("place", range(1, 2 * GAMMA - 1))
def test_usage_counts_no_token_behind_a_stop_string(text, place):
    words = [f"<{token}>".encode() for token in range(VOCAB)]
    stop = f"{text[place]}><{text[place + 1]}"  # across two tokens
    engine = drafting(text, token_bytes=words)
    active = engine.add(
        "a", PROMPT, temperature=0.0, max_tokens=24, logprobs=0, stop=(stop,), ignore_eos=True
    )
    engine.run()
    output = engine.outputs["a"][0]
    assert output.text == "".join(f"<{token}>" for token in text[:place]) + "<"
    assert output.tokens == text[: place + 2]
    assert len(output.logprobs) == place + 2
    assert (output.finish, output.reason) == ("stop", stop)
    assert active.usage.completion_tokens == place + 2
    assert active.usage.accepted_tokens <= place + 1
