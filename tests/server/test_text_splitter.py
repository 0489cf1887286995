"""Answers come apart the same way however they are cut, and what is no call is said as it stands."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from server.text_splitter import Part, TextSplitter
from server.tool_formats import FORMATS, HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, ToolFormat, recognise

TOOLS = {"weather", "add"}
WEATHER = '{"name": "weather", "arguments": {"city": "Köln \\"}\\" 👍", "days": [1, 2.5e3, null]}}'
ADD = '{"name": "add", "arguments": {"a": {"b": {}}, "c": []}}'


def split(pieces: list[str], form: ToolFormat | None = HERMES, **how: bool) -> list[tuple[str, str]]:
    """The parts, neighbours of a kind joined."""
    splitter = TextSplitter(form, TOOLS, **how)
    parts: list[Part] = []
    for piece in pieces:
        parts += splitter.feed(piece)
    parts += splitter.finish()
    joined: list[tuple[str, str]] = []
    for part in parts:
        if joined and joined[-1][0] == part.kind != "call":
            joined[-1] = (part.kind, joined[-1][1] + part.text)
        else:
            joined.append((part.kind, part.text))
    return joined


def arguments(call: str) -> str:
    """The text of a call's arguments, as it stands."""
    return call[call.index(": {") + 2 : -1]


def called(*calls: str) -> list[tuple[str, str]]:
    return [
        part
        for call in calls
        for part in (("call", json.loads(call)["name"]), ("arguments", arguments(call)))
    ]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("Hello, <b>you</b>.", [("content", "Hello, <b>you</b>.")]),
        ("  two\n blanks \n", [("content", "  two\n blanks \n")]),
        ("", []),
        (f"<tool_call>\n{WEATHER}\n</tool_call>", called(WEATHER)),
        (f"<tool_call>{WEATHER}</tool_call>", called(WEATHER)),
        (f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{ADD}\n</tool_call>\n", called(WEATHER, ADD)),
        (f"<tool_call>[{WEATHER}, {ADD}]</tool_call>", called(WEATHER, ADD)),
        (
            f"I look.\n<tool_call>{ADD}</tool_call>\nDone.\n",
            [("content", "I look."), *called(ADD), ("content", "Done.\n")],
        ),
        (f"<tool_call>{ADD}", called(ADD)),  # the end was forgotten, or cut off
        (f"<tool_call>{ADD}</tool_c", called(ADD)),
        (f"<tool_call>{ADD}\nSo.", [*called(ADD), ("content", "So.")]),
        (
            '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>',
            [("call", "add"), ("arguments", '{"a": 1}')],
        ),
        ('<tool_call>{"name": "add"}</tool_call>', [("call", "add"), ("arguments", "{}")]),
        (
            '<tool_call>{"id": "x", "name": "add", "arguments": {"a": 1',
            [("call", "add"), ("arguments", '{"a": 1')],
        ),
    ],
)
def test_hermes(text: str, parts: list[tuple[str, str]]) -> None:
    assert split([text]) == parts
    assert split(list(text)) == parts


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        "a <tool_call",
        "a  <tool_call> oh </tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "text"}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "name": "add", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>{'name': 'add'}</tool_call>",
        '<tool_call>{"name": "add", }</tool_call>',
        '<tool_call>{"name": "add',
        "<tool_call>[]</tool_call>",
        '{"name": "add", "arguments": {}}',
        "<tool_call>" * 50,
        "<tool_call>" + "[" * 100,
        '<tool_call>{"a": 01, "name": "add", "arguments": {}}',
        '<tool_call>{"a": "\\x", "name": "add", "arguments": {}}',
        '<tool_call>{"a": tru, "name": "add", "arguments": {}}',
        '<tool_call>{"\\ud800": 1, "name": "\\ud800"}',
    ],
)
def test_what_is_no_call_is_said(text: str) -> None:
    assert split([text]) == [("content", text)]
    assert split(list(text)) == [("content", text)]


def test_arguments_that_break_off_end_the_call() -> None:
    """What was passed on stays a call; the rest is said."""
    text = '<tool_call>{"name": "add", "arguments": {"a": }} so </tool_call>'
    parts = [("call", "add"), ("arguments", '{"a": '), ("content", "}} so </tool_call>")]
    assert split([text]) == split(list(text)) == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (WEATHER, called(WEATHER)),
        (f"<|python_tag|>{WEATHER}", called(WEATHER)),
        (f"{WEATHER}; {ADD}", called(WEATHER, ADD)),
        (ADD.replace("arguments", "parameters"), called(ADD)),
        ('{"city": "Köln"}', [("content", '{"city": "Köln"}')]),
        ('It is {"name": "add", "arguments": {}}', [("content", 'It is {"name": "add", "arguments": {}}')]),
    ],
)
def test_llama(text: str, parts: list[tuple[str, str]]) -> None:
    assert split([text], LLAMA3) == split(list(text), LLAMA3) == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"[TOOL_CALLS][{WEATHER}]", called(WEATHER)),
        (f"[TOOL_CALLS] [{WEATHER}, {ADD}]", called(WEATHER, ADD)),
        (f"Well. [TOOL_CALLS][{ADD}] So", [("content", "Well."), *called(ADD), ("content", "So")]),
        ("[TOOL_CALLS]none", [("content", "[TOOL_CALLS]none")]),
        ("[1, 2]", [("content", "[1, 2]")]),
    ],
)
def test_mistral(text: str, parts: list[tuple[str, str]]) -> None:
    assert split([text], MISTRAL) == split(list(text), MISTRAL) == parts


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (f"[TOOL_CALLS]weather[ARGS]{arguments(WEATHER)}", called(WEATHER)),
        (
            f"[TOOL_CALLS]weather[ARGS]{arguments(WEATHER)}[TOOL_CALLS] add[ARGS] {arguments(ADD)}\nSo",
            [*called(WEATHER, ADD), ("content", "So")],
        ),
        (
            f"Well. [TOOL_CALLS]add[CALL_ID]a1B2c3D4e[ARGS]{arguments(ADD)}",
            [("content", "Well."), *called(ADD)],
        ),
        (f"[TOOL_CALLS][{WEATHER}, {ADD}]", called(WEATHER, ADD)),  # as before, whatever the template says
        ('[TOOL_CALLS]add[ARGS]{"a": 1', [("call", "add"), ("arguments", '{"a": 1')]),
        *(
            (text, [("content", text)])
            for text in (
                "[TOOL_CALLS]add",
                "[TOOL_CALLS]add[ARGS]",
                "[TOOL_CALLS]add[ARGS][1]",
                "[TOOL_CALLS]other[ARGS]{}",
                "[TOOL_CALLS]add[CALL_ID][ARGS]{}",
                "[TOOL_CALLS]add{}",
                "[TOOL_CALLS]adding up [ARGS]{}",
                "[TOOL_CALLS][add[ARGS]{}",
                "[TOOL_CALLS]" + "x" * 500,
                "add[ARGS]{}",
            )
        ),
    ],
)
def test_mistral_with_the_name_before_the_arguments(text: str, parts: list[tuple[str, str]]) -> None:
    assert split([text], MISTRAL_ARGS) == split(list(text), MISTRAL_ARGS) == parts


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS.keys())
def test_what_is_written_is_understood_and_recognised(form: ToolFormat) -> None:
    text = form.written([("weather", arguments(WEATHER)), ("add", arguments(ADD))])
    assert split([text], form) == called(WEATHER, ADD)
    assert recognise("{{ x }}" + "".join(form.marks)) is form
    assert recognise("{{ x }}") is None


@pytest.mark.parametrize(
    ("text", "thinking", "parts"),
    [
        ("<think>\nHm.\n\nYes.\n</think>\n\nSo.", False, [("reasoning", "Hm.\n\nYes."), ("content", "So.")]),
        ("\n<think>Hm</think>So", False, [("reasoning", "Hm"), ("content", "So")]),
        ("Hm. </think> So.", True, [("reasoning", "Hm."), ("content", "So.")]),
        ("\nHm </thin", True, [("reasoning", "Hm </thin")]),
        ("<think>\n\n</think>\n\nSo.", False, [("content", "So.")]),
        (" <thin So.", False, [("content", " <thin So.")]),
        ("No <think>thoughts</think>.", False, [("content", "No <think>thoughts</think>.")]),
        (
            f"<think>a <tool_call>{ADD}</tool_call></think><tool_call>{ADD}</tool_call>",
            False,
            [("reasoning", f"a <tool_call>{ADD}</tool_call>"), *called(ADD)],
        ),
    ],
)
def test_thoughts(text: str, thinking: bool, parts: list[tuple[str, str]]) -> None:
    assert split([text], thinks=True, thinking=thinking) == parts
    assert split(list(text), thinks=True, thinking=thinking) == parts


def test_a_bare_call_after_thoughts() -> None:
    assert split([f"<think>x</think>\n{ADD}"], LLAMA3, thinks=True) == [("reasoning", "x"), *called(ADD)]


FRAGMENTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        "[ARGS]",
        "[CALL_ID]",
        "add",
        "weather",
    ),
    *(
        WEATHER,
        ADD,
        "[",
        "]",
        "{",
        "}",
        '"',
        ",",
        ";",
        "\\",
        "name",
        ": ",
        " ",
        "\n",
        "hello",
        "👍",
        "<",
        "1e5",
    ),
]


@settings(deadline=None)
@given(
    texts=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12),
    cuts=st.lists(st.integers(0, 400), max_size=30),
    form=st.sampled_from(list(FORMATS.values())),
    thinks=st.booleans(),
    thinking=st.booleans(),
)
@example(["<tool_call>", WEATHER], [20, 60], HERMES, False, False)
def test_any_cutting_gives_the_same(
    texts: list[str], cuts: list[int], form: ToolFormat, thinks: bool, thinking: bool
) -> None:
    text = "".join(texts)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    parts = split(pieces, form, thinks=thinks, thinking=thinking)
    assert parts == split([text], form, thinks=thinks, thinking=thinking)
    for (kind, said), after in zip(parts, [*parts[1:], None], strict=False):
        if kind == "call":
            assert said in TOOLS
            assert after is not None
            assert after[0] == "arguments"
        if kind == "arguments" and after is not None and after[0] == "call":
            assert isinstance(json.loads(said), dict)


@settings(deadline=None)
@given(st.text(alphabet=st.sampled_from('<>/tool_cal"{}:, \n')), st.booleans())
def test_nothing_that_is_said_is_lost_without_calls(text: str, thinks: bool) -> None:
    assert "".join(said for _, said in split(list(text), HERMES, thinks=thinks)) == text
