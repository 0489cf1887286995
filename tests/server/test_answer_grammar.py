"""What the grammars of answers take and refuse, and that what they take is understood by the splitter."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from engine.grammar import GrammarState
from engine.grammar_compiler import GrammarCompiler
from server.answer_grammar import Calls, Thoughts, answer_grammar
from server.chat_answer import ChatAnswer
from server.structured import Form, json_rule
from server.text_splitter import TextSplitter
from server.tool_formats import FORMATS, HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, ToolFormat
from server.tools import Function

MARKS = ["<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<end>"]
WORDS = [
    *(bytes([byte]) for byte in range(32, 127)),
    *(
        b"\n",
        b"\t",
        b"<tool_call>",
        b"</tool_call>",
        b"<think>",
        b"</think>",
        b'{"',
        b'": ',
        b'": {"',
        b'"}',
        b'"}}\n',
        b"}}",
    ),
    *(b' {"', b'"name', b" the", b"</", b"\n\n", b">\n", b"ool_", "é".encode()[:1], "é".encode()[1:]),
    *(mark.encode() for mark in MARKS),
]
SPECIAL = {mark: len(WORDS) - len(MARKS) + i for i, mark in enumerate(MARKS)}
END = SPECIAL["<end>"]
COMPILER = GrammarCompiler(WORDS, frozenset(SPECIAL.values()))
ADD = Function(
    name="add",
    parameters={
        "type": "object",
        "properties": {"a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    },
)
NOW = Function(name="now")
YES = Form("x", json_rule({"enum": ["yes", "no"]}))


def begin(*how: Any) -> GrammarState:
    source = answer_grammar(*how, special=SPECIAL)
    assert source is not None
    return COMPILER.compile(*source.spelt()).begin([END], len(WORDS))


def tokens(text: str) -> list[int]:
    """Marks as one token each, all else byte by byte."""
    ids: list[int] = []
    while text:
        mark = next((mark for mark in SPECIAL if text.startswith(mark)), None)
        ids += [SPECIAL[mark]] if mark else [_byte(byte) for byte in text[0].encode()]
        text = text[len(mark) if mark else 1 :]
    return ids


def _byte(byte: int) -> int:
    return WORDS.index(bytes([byte]))


def takes(state: GrammarState, text: str) -> bool:
    """Whether `text` is a whole answer."""
    ids = tokens(text)
    if state.legal(ids) < len(ids):
        return False
    for token in ids:
        state.advance(token)
    return state.ended or not bool(state.forbidden()[END])


def written(form: ToolFormat, *calls: tuple[str, dict[str, Any]]) -> str:
    return form.written([(name, json.dumps(arguments)) for name, arguments in calls])


each_form = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS.keys())
A, N = ("add", {"a": 1, "b": 22}), ("now", {})


@each_form
def test_required_calls_and_nothing_else(form: ToolFormat) -> None:
    calls = Calls(form, [ADD, NOW], required=True)
    assert takes(begin(None, calls), written(form, A))
    assert takes(begin(None, calls), written(form, N))
    assert takes(begin(None, calls), written(form, A, N, A))
    for wrong in ("", "Hello", "x" + written(form, A), written(form, A) + "x", written(form, ("sub", {}))):
        assert not takes(begin(None, calls), wrong)
    for arguments in ({"a": 1}, {"a": 1, "b": 100}, {"a": "1", "b": 2}, {"a": 1, "b": 2, "c": 3}):
        assert not takes(begin(None, calls), written(form, ("add", arguments)))
    assert not takes(begin(None, calls), written(form, ("now", {"x": 1})))


@each_form
def test_one_call_where_calls_must_not_be_parallel(form: ToolFormat) -> None:
    for required in (True, False):
        calls = Calls(form, [ADD, NOW], required, parallel=False)
        assert takes(begin(None, calls), written(form, A))
        assert not takes(begin(None, calls), written(form, A, N))


@each_form
def test_text_or_calls(form: ToolFormat) -> None:
    calls = Calls(form, [ADD, NOW])
    for text in (
        "",
        "Hello, é.\n\n- x < y\n",
        "An <b>answer</b> with [1, 2] and } {.",
        written(form, A),
        written(form, A, N),
    ):
        assert takes(begin(None, calls), text), text
    assert not takes(begin(None, calls), written(form, ("sub", {})))
    assert not takes(begin(None, calls), written(form, ("add", {"a": 1})))


def test_text_around_calls() -> None:
    calls = Calls(HERMES, [ADD, NOW])
    assert takes(begin(None, calls), f"See:\n{written(HERMES, A)}\nAnd so.\n{written(HERMES, N)}\n")
    assert not takes(begin(None, calls), "See: <tool_call> is how calls begin.")
    assert not takes(begin(None, calls), f"See:\n{written(HERMES, A)} and <tool_call>")
    calls = Calls(MISTRAL, [ADD])
    assert takes(begin(None, calls), f"See: {written(MISTRAL, A)}")
    assert not takes(begin(None, calls), "See: [TOOL_CALLS] is how calls begin.")
    calls = Calls(LLAMA3, [ADD])
    assert takes(begin(None, calls), "<|python_tag|>" + written(LLAMA3, A))
    assert not takes(begin(None, calls), '{"a": 1}')


def test_a_name_before_its_arguments() -> None:
    calls = Calls(MISTRAL_ARGS, [ADD, NOW])
    assert takes(begin(None, calls), 'So: [TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}')
    assert takes(begin(None, calls), "[TOOL_CALLS]now[CALL_ID]aB3456789[ARGS]{}")
    assert not takes(begin(None, calls), "[TOOL_CALLS]now[CALL_ID]aB345678[ARGS]{}")
    assert not takes(begin(None, calls), "[TOOL_CALLS]now{}")
    assert not takes(begin(None, calls), '[TOOL_CALLS][{"name": "now", "arguments": {}}]')
    assert not takes(begin(None, Calls(MISTRAL, [ADD, NOW])), "[TOOL_CALLS]now[ARGS]{}")


def test_a_form_or_calls() -> None:
    both = (YES, Calls(HERMES, [ADD]))
    assert takes(begin(*both), '"yes"')
    assert takes(begin(*both), written(HERMES, A))
    assert not takes(begin(*both), "yes")
    assert not takes(begin(YES, Calls(HERMES, [ADD], required=True)), '"yes"')


def test_thoughts_come_first() -> None:
    for begun in (True, False):
        opened = "" if begun else "<think>"
        state = (YES, None, Thoughts(begun))
        assert takes(begin(*state), opened + "\nHm <tool_call>\n</think>\n\n" + '"no"')
        assert takes(begin(*state), '"no"') == (not begun)
        assert not takes(begin(*state), opened + "\nHm\n")
        required = (None, Calls(HERMES, [ADD], required=True), Thoughts(begun))
        assert takes(begin(*required), opened + "Hm.</think>" + written(HERMES, A))
        bare = (None, Calls(LLAMA3, [ADD]), Thoughts(begun))
        assert takes(begin(*bare), opened + "Hm.</think>" + written(LLAMA3, A))
        if begun:
            assert not takes(begin(*bare), 'Hm.</think>{"a": 1}')
    assert takes(begin(None, Calls(HERMES, [ADD]), Thoughts(True)), "Hm.</think>So.")


def test_a_whole_grammar_of_the_clients_own() -> None:
    own = Form("x", grammar='start: "a" B\nB: /b+/')
    assert takes(begin(own), "abb")
    assert takes(begin(own, None, Thoughts(False)), "<think>x</think>abb")
    assert takes(begin(own, Calls(HERMES, [ADD])), "ab")
    assert takes(begin(own, Calls(HERMES, [ADD])), written(HERMES, A))
    assert not takes(begin(own, Calls(HERMES, [ADD])), "b")


def test_anything_goes_without_forms_and_calls() -> None:
    assert answer_grammar(None, None, Thoughts(True)) is None


def test_json_may_be_laid_out_but_not_padded() -> None:
    form = Form("x", json_rule({"type": "object"}))
    value = {"a": [1, {"b": None}], "c": "d"}
    for indent in (None, 2, 4, "\t"):
        assert takes(begin(form), json.dumps(value, indent=indent))
    assert takes(begin(form), json.dumps(value, separators=(",", ":")))
    assert not takes(begin(form), '{"a":     1}')
    assert not takes(begin(form), '{"a":\n\n\n1}')


@each_form
@pytest.mark.parametrize("required", [True, False])
def test_every_walk_is_understood(form: ToolFormat, required: bool) -> None:
    """Random texts of the grammar come apart into text and calls that keep to their schemas."""
    rng, called = random.Random(7), 0
    for _ in range(60):
        state, data = begin(None, Calls(form, [ADD, NOW], required)), b""
        for _ in range(300):
            legal = (~state.forbidden()).nonzero()[:, 0].tolist()
            if state.ended or (END in legal and rng.random() < 0.2):
                break
            tempting = [
                i
                for i in legal
                if WORDS[i] in (b"<tool_call>", b"{") or WORDS[i].decode("latin1") in MARKS[:4]
            ]
            token = rng.choice(
                tempting if tempting and rng.random() < 0.3 else [i for i in legal if i != END]
            )
            state.advance(token)
            data += WORDS[token]
        else:
            continue
        splitter = TextSplitter(form, ["add", "now"])
        message = ChatAnswer(splitter, form).message(data.decode(errors="replace"))
        for call in message.get("tool_calls", ()):
            called += 1
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "add":
                assert sorted(arguments) == ["a", "b"]
                assert all(0 <= value < 100 for value in arguments.values())
            else:
                assert arguments == {}
        if required:
            assert message["tool_calls"]
            assert message["content"] is None
    assert called > 5
