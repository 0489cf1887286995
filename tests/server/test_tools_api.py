"""Tools, thoughts and forms over HTTP, as the official client sees them; the fake plays the answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.server.conftest import Served

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = '{"name": "weather", "arguments": {"city": "Köln 👍 \\"{\\""}}'
ARGUMENTS = '{"city": "Köln 👍 \\"{\\""}'
HERMES = f"<tool_call>\n{CALL}\n</tool_call>"
QUESTION: list[Any] = [{"role": "user", "content": "What is the weather?"}]


def play(served: Served, text: str, template: str = "") -> None:
    served.engine.text = text.replace("{", "{{").replace("}", "}}")
    if template:
        served.engine.tokenizer.template = template
    served.context.__dict__.pop("ways", None)


@pytest.fixture
def served(roomy: Served) -> Served:
    return roomy


def streamed(served: Served, **fields: Any) -> dict[int, dict[str, Any]]:
    """What a client puts together from the chunks of a stream, by choice."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in served.openai.chat.completions.create(
        model="fake-model", messages=QUESTION, stream=True, **fields
    ):
        for choice in chunk.choices:
            mine = choices.setdefault(
                choice.index, {"content": None, "calls": [], "finish": None, "thoughts": None}
            )
            assert mine["finish"] is None
            delta = choice.delta
            if delta.content:
                mine["content"] = (mine["content"] or "") + delta.content
            thoughts = (delta.model_extra or {}).get("reasoning_content")
            if thoughts:
                mine["thoughts"] = (mine["thoughts"] or "") + thoughts
            for call in delta.tool_calls or []:
                if call.index == len(mine["calls"]):
                    mine["calls"].append([call.id, call.function.name, call.function.arguments])
                else:
                    assert call.id is None
                    mine["calls"][call.index][2] += call.function.arguments
            mine["finish"] = choice.finish_reason
    return choices


def whole(served: Served, **fields: Any) -> dict[int, dict[str, Any]]:
    """The same, not streamed."""
    reply = served.openai.chat.completions.create(model="fake-model", messages=QUESTION, **fields)
    return {
        choice.index: {
            "content": choice.message.content or None,
            "calls": [
                [call.id, call.function.name, call.function.arguments]
                for call in choice.message.tool_calls or []
            ],
            "finish": choice.finish_reason,
            "thoughts": (choice.message.model_extra or {}).get("reasoning_content"),
        }
        for choice in reply.choices
    }


def without_ids(choices: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    ids = [call[0] for choice in choices.values() for call in choice["calls"]]
    assert len(set(ids)) == len(ids)
    return {i: choice | {"calls": [call[1:] for call in choice["calls"]]} for i, choice in choices.items()}


@pytest.mark.parametrize("ask", [streamed, whole])
@pytest.mark.parametrize("width", [1, 3, 7, 1000])
def test_calls(served: Served, ask: Callable[..., Any], width: int) -> None:
    served.engine.tokens_per_step = width
    play(served, f"Let me see.\n{HERMES}\n{HERMES}")
    (choice,) = without_ids(ask(served, tools=[WEATHER, TIME])).values()
    assert choice["calls"] == [["weather", ARGUMENTS]] * 2
    assert choice["content"] == "Let me see."
    assert choice["finish"] == "tool_calls"


@pytest.mark.parametrize("ask", [streamed, whole])
def test_choices_have_calls_of_their_own(served: Served, ask: Callable[..., Any]) -> None:
    play(served, HERMES)
    choices = without_ids(ask(served, tools=[WEATHER], n=2))
    assert [choice["calls"] for choice in choices.values()] == [[["weather", ARGUMENTS]]] * 2
    assert choices[0]["content"] is None


def test_arguments_come_as_they_are_written(served: Served) -> None:
    served.engine.tokens_per_step = 4
    play(served, HERMES)
    stream = served.openai.chat.completions.create(
        model="fake-model", messages=QUESTION, tools=[WEATHER], stream=True
    )
    pieces = [
        call.function.arguments
        for chunk in stream
        for choice in chunk.choices
        for call in choice.delta.tool_calls or []
    ]
    assert len(pieces) > 5
    assert "".join(pieces) == ARGUMENTS


@pytest.mark.parametrize("ask", [streamed, whole])
@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ tools }}<|python_tag|>", CALL.replace('"arguments"', '"parameters"')),
        ("{{ tools }}[TOOL_CALLS]", f"[TOOL_CALLS][{CALL}]"),
        ("{{ tools }}[TOOL_CALLS][ARGS]", f"[TOOL_CALLS]weather[ARGS]{ARGUMENTS}"),
        ("{{ tools }}<tool_call>", HERMES),
        ("", HERMES),  # it knows no tools
    ],
)
def test_the_template_shows_the_family(
    served: Served, ask: Callable[..., Any], template: str, text: str
) -> None:
    play(served, text, template)
    (choice,) = ask(served, tools=[WEATHER]).values()
    assert [call[1:] for call in choice["calls"]] == [["weather", ARGUMENTS]]
    assert len(choice["calls"][0][0]) == (9 if "TOOL_CALLS" in template else 29)


def test_a_template_of_an_unknown_family_needs_the_flag(served: Served, serve: Callable[..., Served]) -> None:
    play(served, HERMES, "{{ tools }}")
    reply = served.chat(tools=[WEATHER])
    assert reply.status_code == 400
    assert "--tool-call-parser" in reply.json()["error"]["message"]
    other = serve(tool_call_parser="mistral")
    play(other, f"[TOOL_CALLS][{CALL}]", "{{ tools }}")
    assert other.chat(tools=[WEATHER]).json()["choices"][0]["finish_reason"] == "tool_calls"


def prompt_of(served: Served, **fields: Any) -> str:
    assert served.chat(**fields).status_code == 200
    ids = served.engine.streams[-1].request.prompt_token_ids
    return served.engine.tokenizer.decode(ids)


def test_a_template_that_knows_tools_gets_them(served: Served) -> None:
    play(served, "hi", "{{ tools }}<tool_call>")
    prompt = prompt_of(served, tools=[WEATHER])
    assert f"[tools=[{WEATHER}]]" in prompt
    assert "You can call functions" not in prompt
    assert "tools=" not in prompt_of(served, tools=[WEATHER], tool_choice="none")


def test_a_template_that_knows_none_is_helped(served: Served) -> None:
    play(served, "hi")
    prompt = prompt_of(
        served,
        tools=[WEATHER],
        messages=[
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {
                        "id": "a",
                        "type": "function",
                        "function": {"name": "weather", "arguments": '{"city": "Bonn"}'},
                    },
                    {"id": "b", "type": "function", "function": {"name": "weather", "arguments": ""}},
                ],
            },
            {"role": "tool", "tool_call_id": "a", "content": "rain"},
            {"role": "tool", "tool_call_id": "b", "content": [{"type": "text", "text": "sun"}]},
        ],
    )
    assert prompt.startswith("<system>You can call functions.")
    assert json.dumps(WEATHER["function"]) in prompt
    assert "\n\nBe kind.<user>Weather?<assistant><tool_call>\n" in prompt
    assert '{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>\n<tool_call>' in prompt
    assert prompt.endswith(
        "<user><tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response><assistant>"
    )
    assert prompt_of(served, tools=[TIME]).startswith("<system>You can call functions.")


def test_earlier_calls_reach_a_template_as_objects(served: Served) -> None:
    play(served, "hi", "{{ tools }}<tool_call>")
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    messages = [
        *QUESTION,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "content": "x", "tool_call_id": "a"},
    ]
    seen: list[Any] = []
    tokenizer = served.engine.tokenizer
    original = tokenizer.apply_chat_template
    try:
        tokenizer.apply_chat_template = lambda turns, **how: seen.append(turns) or original(turns, **how)  # type: ignore[method-assign]
        assert served.chat(messages=messages).status_code == 200
    finally:
        del tokenizer.apply_chat_template
    assert seen[0][1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": [1]}}
    assert seen[0][2]["role"] == "tool"


def test_without_tools_nothing_is_taken_for_a_call(served: Served) -> None:
    play(served, HERMES)
    for fields in ({}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = served.chat(**fields).json()["choices"][0]
        assert choice["message"]["content"] == HERMES
        assert choice["finish_reason"] == "stop"


def test_a_call_that_is_cut_off_says_so(served: Served) -> None:
    play(served, HERMES)
    choice = served.chat(tools=[WEATHER], max_tokens=50).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert ARGUMENTS.startswith(choice["message"]["tool_calls"][0]["function"]["arguments"])


@pytest.mark.parametrize("ask", [streamed, whole])
@pytest.mark.parametrize("width", [1, 5])
def test_thoughts(served: Served, ask: Callable[..., Any], width: int) -> None:
    served.engine.tokens_per_step = width
    play(served, "<think>\nHm, 👍.\n</think>\n\nYes.", "<think>")
    (choice,) = ask(served).values()
    assert choice == {"content": "Yes.", "calls": [], "finish": "stop", "thoughts": "Hm, 👍."}


def test_thoughts_that_the_prompt_begins(served: Served) -> None:
    play(served, "Hm.</think>Yes.", "<think>")
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "<think>\n"}]
    reply = served.chat(messages=messages, add_generation_prompt=False).json()
    assert reply["choices"][0]["message"]["reasoning_content"] == "Hm."
    assert reply["choices"][0]["message"]["content"] == "Yes."


def test_thoughts_are_text_where_the_operator_says_so(serve: Callable[..., Served]) -> None:
    served = serve(reasoning_parser="none")
    play(served, "<think>Hm</think>Yes.", "<think>")
    assert served.chat().json()["choices"][0]["message"]["content"] == "<think>Hm</think>Yes."


def test_logprobs_are_one_a_token_with_tools(served: Served) -> None:
    play(served, f"So.\n{HERMES}")
    reply = served.chat(tools=[WEATHER], logprobs=True)
    assert len(reply.json()["choices"][0]["logprobs"]["content"]) == len(f"So.\n{HERMES}".encode())
    entries = 0
    for chunk in served.openai.chat.completions.create(
        model="fake-model", messages=QUESTION, tools=[WEATHER], logprobs=True, stream=True
    ):
        for choice in chunk.choices:
            entries += len(choice.logprobs.content or []) if choice.logprobs else 0
    assert entries == len(f"So.\n{HERMES}".encode())


# ---- what the engine is asked for


def grammar_of(served: Served, path: str = "/v1/chat/completions", **fields: Any) -> Any:
    prompt = {"prompt": "hi"} if path == "/v1/completions" else {"messages": QUESTION}
    assert served.post(path, prompt | fields).status_code == 200
    return served.engine.streams[-1].request.grammar


FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": True}}},
    {"structured_outputs": {"json": {"type": "integer"}}},
    {"structured_outputs": {"json": '{"type": "integer"}'}},
    {"structured_outputs": {"regex": "[a-c]+/\\d"}},
    {"structured_outputs": {"choice": ["yes", 'no "quotes" \n', "ü"]}},
    {"structured_outputs": {"grammar": 'start: "a" | "b"'}},
    {"structured_outputs": {"grammar": 'root ::= "a" | "b"'}},
]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_forms_become_grammars(served: Served, path: str, form: dict[str, Any]) -> None:
    first = grammar_of(served, path, **form)
    assert first is not None
    assert grammar_of(served, path, **form) is first, "compiled twice"


def test_no_form_is_no_grammar(served: Served) -> None:
    assert grammar_of(served, response_format={"type": "text"}) is None
    assert grammar_of(served) is None
    assert grammar_of(served, tools=[WEATHER], tool_choice="none") is None
    assert grammar_of(served, tools=[WEATHER]) is not None


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": function}


def of_schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


BROKEN_CALL = {"role": "assistant", "tool_calls": [{"id": "a"} | tool(name="f", arguments="{")]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
        (of_schema({"type": "what"}), "response_format"),
        (of_schema({"if": {}, "then": False}), "response_format"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": "nonsense"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": "[" * 100000}}, "structured_outputs.json"),
        ({"structured_outputs": {"grammar": "nonsense"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "root ::= nothing"}}, "structured_outputs.grammar"),
        (of_schema({}) | {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [tool(name="a", parameters={"type": "what"})]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": tool(name="other")}, "tool_choice"),
        ({"messages": [*QUESTION, BROKEN_CALL]}, "messages[1].tool_calls"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_is_wrong_is_named(served: Served, fields: dict[str, Any], param: str) -> None:
    reply = served.chat(**fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"].startswith(param)
    assert len(reply.content) < 10_000
    assert not served.engine.streams, "the engine was bothered"
    assert served.chat().status_code == 200


def test_the_official_clients_parsed_forms_and_helpers_work(served: Served) -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    play(served, '{"name": "Ada", "age": 36}')
    reply = served.openai.chat.completions.parse(
        model="fake-model", messages=QUESTION, response_format=Person
    )
    assert reply.choices[0].message.parsed == Person(name="Ada", age=36)
