"""Tools, forms and thoughts on /v1/responses: as the official client sees them, and as chat does it."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.server.conftest import Served
from tests.server.test_errors_api import check_error
from tests.server.test_responses import prompt_of, respond, typed_events
from tests.server.test_tools_api import ARGUMENTS, HERMES, TIME, WEATHER, play

FLAT: Any = [{"type": "function"} | tool["function"] for tool in (WEATHER, TIME)]
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
FORM = {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}


@pytest.fixture
def served(roomy: Served) -> Served:
    return roomy


def said(response: Any) -> list[tuple[str, ...]]:
    """The output, without ids."""
    items: list[tuple[str, ...]] = []
    for item in response.output:
        if item.type == "function_call":
            items.append(("call", item.name, item.arguments))
        else:
            items.append((item.type, "".join(part.text for part in item.content)))
    return items


def request_of(served: Served) -> Any:
    return served.engine.streams[-1].request


TWO_CALLS = f"Let me see.\n{HERMES}\n{HERMES}"
TWO_CALLS_SAID = [("message", "Let me see."), *[("call", "weather", ARGUMENTS)] * 2]


@pytest.mark.parametrize("width", [1, 3, 7, 1000])
def test_calls_streamed_and_whole(served: Served, width: int) -> None:
    served.engine.tokens_per_step = width
    play(served, TWO_CALLS)
    ask: dict[str, Any] = {"model": "fake-model", "input": "Weather?", "tools": FLAT}
    whole = served.openai.responses.create(**ask)
    assert said(whole) == TWO_CALLS_SAID
    assert whole.output_text == "Let me see."
    assert whole.status == "completed"
    calls = whole.output[1:]
    assert len({call.call_id for call in calls}) == 2
    assert all(call.call_id.startswith("call_") for call in calls)
    with served.openai.responses.stream(**ask) as stream:  # puts snapshots together, and checks them
        events = list(stream)
        final = stream.get_final_response()
    assert said(final) == TWO_CALLS_SAID
    assert final.usage == whole.usage
    snapshots = [each.snapshot for each in events if each.type == "response.function_call_arguments.delta"]
    assert snapshots.count(ARGUMENTS) == 2
    if width < 5:
        assert len(snapshots) > 10, "arguments come as they are written"
    raw = list(served.openai.responses.create(**ask, stream=True))
    assert [event.sequence_number for event in raw] == list(range(len(raw)))
    done = [event for event in raw if event.type == "response.function_call_arguments.done"]
    assert [(each.output_index, each.arguments) for each in done] == [(1, ARGUMENTS), (2, ARGUMENTS)]
    ended = [event.item for event in raw if event.type == "response.output_item.done"]
    assert ended == raw[-1].response.output


def test_the_order_of_events(served: Served) -> None:
    play(served, f"<think>Hm</think>\nSo\n{HERMES}", "{{ tools }}<tool_call><think>")
    served.engine.tokens_per_step = 1000
    kinds = [event["type"].removeprefix("response.") for event in typed_events(served, tools=FLAT)]
    assert kinds == [
        *("created", "in_progress"),
        *("output_item.added", "content_part.added", "reasoning_text.delta"),
        *("reasoning_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *("output_item.added", "function_call_arguments.delta"),
        *("function_call_arguments.done", "output_item.done"),
        "completed",
    ]


@pytest.mark.parametrize("stream_interval", [1, 9])
def test_a_call_that_is_cut(served: Served, serve: Any, stream_interval: int) -> None:
    if stream_interval > 1:
        served = serve(stream_interval=stream_interval)
        served.engine.max_model_len = 8192
    play(served, HERMES)
    last = typed_events(served, tools=FLAT, max_output_tokens=50)[-1]
    assert last["type"] == "response.incomplete"
    (item,) = last["response"]["output"]
    assert (item["type"], item["status"]) == ("function_call", "incomplete")
    assert ARGUMENTS.startswith(item["arguments"])


def test_what_was_asked_is_repeated(served: Served) -> None:
    choice = {"type": "function", "name": "weather"}
    body = respond(served, tools=FLAT, tool_choice=choice, parallel_tool_calls=False).json()
    assert body["tool_choice"] == choice
    assert body["parallel_tool_calls"] is False
    assert [tool["name"] for tool in body["tools"]] == ["weather", "time"]
    assert body["tools"][0]["parameters"] == WEATHER["function"]["parameters"]
    assert body["text"] == {"format": {"type": "text"}}
    assert respond(served, tools=FLAT, tool_choice="none").json()["tool_choice"] == "none"
    assert respond(served, text={"format": FORM}).json()["text"] == {"format": FORM}


# ---- one path for both endpoints: the same question is asked of the engine

CHAT_CHOICE = {"type": "function", "function": {"name": "weather"}}
FLAT_CHOICE = {"type": "function", "name": "weather"}


@pytest.mark.parametrize("template", ["", "{{ tools }}<tool_call>", "{{ tools }}[TOOL_CALLS][ARGS]"])
@pytest.mark.parametrize(
    ("flat", "chat"),
    [
        ({}, {}),
        ({"parallel_tool_calls": False}, {"parallel_tool_calls": False}),
        ({"tool_choice": "required"}, {"tool_choice": "required"}),
        ({"tool_choice": "none"}, {"tool_choice": "none"}),
        ({"tool_choice": FLAT_CHOICE}, {"tool_choice": CHAT_CHOICE}),
        ({"text": {"format": {"type": "json_object"}}}, {"response_format": {"type": "json_object"}}),
        (
            {"text": {"format": FORM}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        ),
        ({"structured_outputs": {"regex": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
    ],
    ids=str,
)
def test_prompt_and_grammar_are_those_of_chat(
    served: Served, template: str, flat: dict[str, Any], chat: dict[str, Any]
) -> None:
    play(served, "hi", template)
    assert respond(served, tools=FLAT, **flat).status_code == 200
    own = request_of(served)
    assert served.chat(tools=[WEATHER, TIME], **chat).status_code == 200
    other = request_of(served)
    assert own.prompt_token_ids == other.prompt_token_ids
    assert own.grammar is other.grammar, "compiled once for both"
    assert (own.grammar is None) == (flat.get("tool_choice") == "none")
    assert own.spoken_ids == other.spoken_ids
    assert own.params == other.params


def turn(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content} | more


def chat_call(call: str, city: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": json.dumps({"city": city})}
    return {"id": call, "type": "function", "function": function}


def flat_call(call: str, city: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": json.dumps({"city": city})}
    return {"type": "function_call", "id": f"fc_{call}", "call_id": call, "status": "completed"} | function


def output(call: str, text: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call, "output": text}


THOUGHT = {
    "type": "reasoning",
    "id": "r",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm"}],
}
SUMMARY = {"type": "reasoning", "id": "r", "summary": [{"type": "summary_text", "text": "Hm"}]}
CONVERSATIONS: list[tuple[list[Any], list[Any]]] = [
    (  # a call, alone or with text before it, is a turn; so are several
        [turn("user", "a"), flat_call("1", "Bonn"), output("1", "rain")],
        [
            turn("user", "a"),
            turn("assistant", "", tool_calls=[chat_call("1", "Bonn")]),
            turn("tool", "rain", tool_call_id="1"),
        ],
    ),
    (
        [
            turn("user", "a"),
            turn("assistant", "so"),
            flat_call("1", "Bonn"),
            flat_call("2", "Ulm"),
            output("2", [{"type": "input_text", "text": "sun"}]),
            output("1", ""),
            flat_call("3", "Ulm"),
            output("3", "x"),
        ],
        [
            turn("user", "a"),
            turn("assistant", "so", tool_calls=[chat_call("1", "Bonn"), chat_call("2", "Ulm")]),
            turn("tool", "sun", tool_call_id="2"),
            turn("tool", "", tool_call_id="1"),
            turn("assistant", "", tool_calls=[chat_call("3", "Ulm")]),
            turn("tool", "x", tool_call_id="3"),
        ],
    ),
    (  # thoughts belong to what comes behind them
        [
            turn("user", "a"),
            THOUGHT,
            flat_call("1", "Bonn"),
            output("1", "x"),
            SUMMARY,
            turn("assistant", "b"),
            turn("user", "c"),
        ],
        [
            turn("user", "a"),
            turn("assistant", "", reasoning_content="Hm", tool_calls=[chat_call("1", "Bonn")]),
            turn("tool", "x", tool_call_id="1"),
            turn("assistant", "b", reasoning_content="Hm"),
            turn("user", "c"),
        ],
    ),
    (  # answers in a row stay apart
        [turn("user", "a"), turn("assistant", "b"), turn("assistant", "c"), THOUGHT, turn("assistant", "d")],
        [
            turn("user", "a"),
            turn("assistant", "b"),
            turn("assistant", "c"),
            turn("assistant", "d", reasoning_content="Hm"),
        ],
    ),
    (  # but not what came in one answer
        [
            turn("user", "a"),
            THOUGHT,
            SUMMARY,
            turn("assistant", "b"),
            flat_call("1", "Ulm"),
            turn("assistant", "c"),
            output("1", "x"),
        ],
        [
            turn("user", "a"),
            turn("assistant", "b\nc", reasoning_content="Hm\nHm", tool_calls=[chat_call("1", "Ulm")]),
            turn("tool", "x", tool_call_id="1"),
        ],
    ),
]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("flat", "chat"), CONVERSATIONS)
def test_a_conversation_is_rendered_as_that_of_chat(
    served: Served, flat: list[Any], chat: list[Any], native: bool
) -> None:
    play(served, "hi", "{{ tools }}<tool_call>" if native else "")
    seen: list[Any] = []
    tokenizer = served.engine.tokenizer
    original = tokenizer.apply_chat_template
    try:
        tokenizer.apply_chat_template = lambda turns, **how: seen.append(turns) or original(turns, **how)  # type: ignore[method-assign]
        assert respond(served, input=flat, tools=FLAT).status_code == 200
        assert served.chat(messages=chat, tools=[WEATHER, TIME]).status_code == 200
    finally:
        del tokenizer.apply_chat_template
    assert seen[0] == seen[1]


def test_the_loop_of_an_agent(served: Served) -> None:
    """As the documentation of OpenAI shows it: what came out goes in again, with the outputs of the calls."""
    play(served, HERMES)
    talk: list[Any] = [{"role": "user", "content": "Weather?"}]
    first = served.openai.responses.create(model="fake-model", input=talk, tools=FLAT)
    (call,) = first.output
    talk += first.output
    talk.append({"type": "function_call_output", "call_id": call.call_id, "output": "rain"})
    play(served, "It rains.")
    second = served.openai.responses.create(model="fake-model", input=talk, tools=FLAT)
    assert second.output_text == "It rains."
    assert prompt_of(served).endswith(
        f"<user>Weather?<assistant>{HERMES}<user><tool_response>\nrain\n</tool_response><assistant>"
    )


# ---- forms and thoughts


def test_the_official_clients_parsed_forms_work(served: Served) -> None:
    class Person(BaseModel):
        name: str
        age: int

    play(served, '{"name": "Ada", "age": 36}')
    reply = served.openai.responses.parse(model="fake-model", input="Who?", text_format=Person)
    assert reply.output_parsed == Person(name="Ada", age=36)
    assert request_of(served).grammar is not None
    with served.openai.responses.stream(model="fake-model", input="Who?", text_format=Person) as stream:
        assert stream.get_final_response().output_parsed == Person(name="Ada", age=36)
    tool = openai.pydantic_function_tool(Person)["function"]
    flat: Any = {"type": "function"} | tool
    play(served, '<tool_call>\n{"name": "Person", "arguments": {"name": "Ada", "age": 36}}\n</tool_call>')
    called = served.openai.responses.parse(model="fake-model", input="Who?", tools=[flat])
    assert called.output[0].parsed_arguments == {"name": "Ada", "age": 36}  # type: ignore[union-attr]


@pytest.mark.parametrize("width", [1, 5])
def test_thoughts_are_items(served: Served, width: int) -> None:
    served.engine.tokens_per_step = width
    play(served, "<think>\nHm, 👍.\n</think>\n\nYes.", "<think>")
    with served.openai.responses.stream(model="fake-model", input="Why?") as stream:
        final = stream.get_final_response()
    whole = served.openai.responses.create(model="fake-model", input="Why?")
    assert said(final) == said(whole) == [("reasoning", "Hm, 👍."), ("message", "Yes.")]
    assert final.output_text == "Yes."
    served.openai.responses.create(
        model="fake-model",
        input=[*whole.output, {"role": "user", "content": "And?"}],  # type: ignore[list-item]
    )
    assert prompt_of(served).endswith("<assistant>Yes.<user>And?<assistant>")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [*FLAT, {"type": "mcp", "server_label": "x"}]}, "tools[2]"),
        ({"tools": [{"name": "f"}]}, "tools[0]"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [WEATHER]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [FLAT[0] | {"strict": "yes"}]}, "tools[0].strict"),
        ({"tools": [FLAT[0] | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"type": "what"}}]}, "tools"),
        ({"tools": [FLAT[0], FLAT[0]]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": FLAT, "tool_choice": "any"}, "tool_choice"),
        ({"tools": FLAT, "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": FLAT, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"tools": FLAT, "tool_choice": CHAT_CHOICE}, "tool_choice"),
        ({"tools": FLAT, "top_logprobs": 1}, "top_logprobs"),
        ({"tools": FLAT, "max_tool_calls": 1}, "max_tool_calls"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "text", "name": "x"}}}, "text.format"),
        ({"text": {"format": FORM | {"schema": {"type": "what"}}}}, "text.format"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": FORM}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"text": {"wording": "plain"}}, "text.wording"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"reasoning": {"effort": "low"}}, "reasoning"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input"),
        ({"input": [flat_call("1", "Bonn") | {"arguments": "{"}]}, "input"),
        ({"input": [flat_call("1", "Bonn") | {"arguments": "[1]"}]}, "input"),
        ({"input": [flat_call("1", "Bonn") | {"call_id": None}]}, "input"),
        ({"input": [flat_call("1", "Bonn") | {"name": 5}]}, "input"),
        ({"input": [output("1", None)]}, "input"),
        ({"input": [output("1", [{"type": "input_image"}])]}, "input"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input"),
        ({"input": [{"type": "reasoning", "content": [{"type": "input_text", "text": "x"}]}]}, "input"),
    ],
    ids=lambda value: str(value)[:70],
)
def test_what_is_wrong_is_named(served: Served, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        reply = respond(served, stream=stream, **fields)
        assert reply.status_code == 400, reply.text
        named = reply.json()["error"]["param"]
        assert named == param or (param == "tool_choice" and named.startswith(param))
        check_error(reply, 400, named)
    assert not served.engine.streams, "the engine was bothered"
    assert respond(served).status_code == 200


def test_logprobs_of_answers_that_begin_with_thoughts_are_refused(served: Served) -> None:
    play(served, "Yes.", "<think>")
    check_error(respond(served, top_logprobs=0), 400, "top_logprobs")


@pytest.mark.long
def test_langchain_calls_tools(served: Served) -> None:
    """By chat and by responses, whole and streamed, and with an output of a schema."""
    langchain = pytest.importorskip("langchain_openai", reason="comes with the extra 'test'")
    how = {"model": "fake-model", "base_url": f"{served.url}/v1", "api_key": "k", "max_retries": 0}
    arguments = json.loads(ARGUMENTS)
    for newer in (False, True):
        model = langchain.ChatOpenAI(use_responses_api=newer, **how)
        play(served, TWO_CALLS)
        first, *others = model.bind_tools([WEATHER]).stream("Weather?")
        for chunk in others:
            first += chunk
        for message in (first, model.bind_tools([WEATHER], tool_choice="required").invoke("Weather?")):
            assert message.text == "Let me see."
            assert [(call["name"], call["args"]) for call in message.tool_calls] == [
                ("weather", arguments)
            ] * 2
        outputs = [
            {"role": "tool", "content": "rain", "tool_call_id": call["id"]} for call in message.tool_calls
        ]
        play(served, "It rains.")
        after = model.bind_tools([WEATHER]).invoke(
            [{"role": "user", "content": "Weather?"}, message, *outputs]
        )
        assert after.text == "It rains."
        assert prompt_of(served).count("<tool_response>\nrain") == 2
        play(served, '{"age": 36}')
        schema = SCHEMA | {"title": "person", "description": "A person"}
        formed = model.with_structured_output(schema, method="json_schema")
        assert formed.invoke("Who?") == {"age": 36}
