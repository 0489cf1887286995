"""Calls that applications make, through the official client, to the default model, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.server.test_structured_end_to_end import CITIES, FORM, MODEL, SCHEMA, WEATHER, Real, conforms

pytestmark = [pytest.mark.model, pytest.mark.slow]

#: of one choice: its text, its calls as (name, arguments), and why it ended
Answer = tuple[str, list[tuple[str, str]], str]


def chat(client: openai.OpenAI, **fields: Any) -> list[Answer]:
    reply = client.chat.completions.create(**fields)
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    return [
        (
            choice.message.content or "",
            [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []],  # type: ignore[union-attr]
            choice.finish_reason,
        )
        for choice in reply.choices
    ]


def chat_streamed(client: openai.OpenAI, **fields: Any) -> list[Answer]:
    texts: dict[int, str] = {}
    calls: dict[int, list[tuple[str, str]]] = {}
    ends: dict[int, str] = {}
    stream = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **fields)
    for chunk in stream:
        for choice in chunk.choices:
            i, mine = choice.index, calls.setdefault(choice.index, [])
            texts[i] = texts.get(i, "") + (choice.delta.content or "")
            for call in choice.delta.tool_calls or []:
                if call.index == len(mine):
                    mine.append((call.function.name, ""))
                name, arguments = mine[call.index]
                mine[call.index] = name, arguments + call.function.arguments
            if choice.finish_reason:
                ends[i] = choice.finish_reason
    assert chunk.usage is not None
    return [(texts[i], calls[i], ends[i]) for i in sorted(texts)]


def text(client: openai.OpenAI, **fields: Any) -> list[Answer]:
    reply = client.completions.create(**fields)
    return [(choice.text, [], choice.finish_reason) for choice in reply.choices]


def text_streamed(client: openai.OpenAI, **fields: Any) -> list[Answer]:
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    for chunk in client.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.finish_reason:
                ends[choice.index] = choice.finish_reason
    return [(texts[i], [], ends[i]) for i in sorted(texts)]


def response(client: openai.OpenAI, **fields: Any) -> list[Answer]:
    return [of_response(client.responses.create(**fields))]


def response_streamed(client: openai.OpenAI, **fields: Any) -> list[Answer]:
    deltas: dict[int, str] = {}
    for event in client.responses.create(stream=True, **fields):
        if event.type.endswith(".delta"):
            deltas[event.output_index] = deltas.get(event.output_index, "") + event.delta
    answer = of_response(event.response)
    assert "".join(deltas.values()) == answer[0] + "".join(arguments for _, arguments in answer[1])
    return [answer]


def of_response(reply: Any) -> Answer:
    calls = [(item.name, item.arguments) for item in reply.output if item.type == "function_call"]
    return reply.output_text, calls, reply.status


CLIENTS: dict[str, tuple[Callable[..., list[Answer]], Callable[..., list[Answer]]]] = {
    "chat": (chat, chat_streamed),
    "text": (text, text_streamed),
    "responses": (response, response_streamed),
}


def says(answers: list[Answer]) -> bool:
    return all(said and not calls for said, calls, _ in answers)


def calls_weather(answers: list[Answer]) -> bool:
    ((_, calls, _),) = answers
    asked = [json.loads(arguments) for _, arguments in calls]
    return [name for name, _ in calls] == ["weather"] and set(asked[0]) == {"city", "unit"}


def is_a_city(answers: list[Answer]) -> bool:
    ((said, _, _),) = answers
    return conforms(said)


QUESTION: Any = [{"role": "user", "content": "What is the capital of Norway?"}]
TALK: Any = [
    {"role": "system", "content": "Answer in one word."},
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": [{"type": "text", "text": "And of"}, {"type": "text", "text": "Italy?"}]},
]
FLAT: Any = [{"type": "function"} | WEATHER["function"]]
CALLED: Any = {"name": "weather", "arguments": '{"city": "Oslo", "unit": "C"}'}
CALL: Any = {"id": "call_1", "type": "function", "function": CALLED}
RESULT: Any = [
    {"role": "user", "content": "What is the weather in Oslo?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain, 7 C"},
]
FLAT_RESULT: Any = [
    {"role": "user", "content": "What is the weather in Oslo?"},
    {"type": "function_call", "call_id": "call_1"} | CALLED,
    {"type": "function_call_output", "call_id": "call_1", "output": "rain, 7 C"},
]
CITY: Any = [{"role": "user", "content": f"Tell me about {CITIES[2]}, as JSON."}]
FLAT_FORM: Any = {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}}
REQUIRED: Any = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}

#: endpoint, fields beside the model (greedy unless they say so), and what the answers must be like
TYPICAL: dict[str, tuple[str, dict[str, Any], Callable[[list[Answer]], bool]]] = {
    "a question": ("chat", {"messages": QUESTION, "max_tokens": 12}, says),
    "a conversation": ("chat", {"messages": TALK, "max_completion_tokens": 12}, says),
    "a seed": (
        "chat",
        {"messages": QUESTION, "seed": 1, "temperature": 0.8, "top_p": 0.9, "max_tokens": 12},
        says,
    ),
    "penalties": (
        "chat",
        {"messages": QUESTION, "presence_penalty": 0.5, "frequency_penalty": 0.5, "max_tokens": 12},
        says,
    ),
    "stop strings": (
        "chat",
        {"messages": QUESTION, "stop": ["Oslo", "\n\n"], "max_tokens": 12},
        lambda answers: "Oslo" not in answers[0][0],
    ),
    "a bias": ("chat", {"messages": QUESTION, "logit_bias": {"28": -100}, "max_tokens": 12}, says),
    "choices": (
        "chat",
        {"messages": QUESTION, "n": 3, "seed": 4, "temperature": 1, "max_tokens": 8},
        lambda answers: len(answers) == 3 and says(answers),
    ),
    "logprobs": ("chat", {"messages": QUESTION, "logprobs": True, "top_logprobs": 3, "max_tokens": 6}, says),
    "bookkeeping": (
        "chat",
        {"messages": QUESTION, "user": "u", "metadata": {"a": "b"}, "store": False, "max_tokens": 6},
        says,
    ),
    "extensions": (
        "chat",
        {
            "messages": QUESTION,
            "max_tokens": 12,
            "temperature": 1,
            "seed": 2,
            "extra_body": {"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, "min_tokens": 4},
        },
        says,
    ),
    "without drafts": (
        "chat",
        {"messages": QUESTION, "max_tokens": 12, "extra_body": {"num_speculative_tokens": 0}},
        says,
    ),
    "cut": (
        "chat",
        {"messages": QUESTION, "max_tokens": 2},
        lambda answers: answers[0][2] == "length",
    ),
    "JSON of a schema": ("chat", {"messages": CITY, "response_format": FORM, "max_tokens": 250}, is_a_city),
    "any JSON": (
        "chat",
        {"messages": CITY, "response_format": {"type": "json_object"}, "max_tokens": 40},
        lambda answers: answers[0][0].startswith("{"),
    ),
    "one of several": (
        "chat",
        {"messages": QUESTION, "extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}},
        lambda answers: answers[0][0] in ("yes", "no"),
    ),
    "tools that may be called": ("chat", {"messages": QUESTION, "tools": [WEATHER], "max_tokens": 40}, bool),
    "a tool that must be called": (
        "chat",
        {"messages": RESULT[:1], "max_tokens": 120} | REQUIRED,
        calls_weather,
    ),
    "a named tool": (
        "chat",
        {
            "messages": RESULT[:1],
            "tools": [WEATHER],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
            "max_tokens": 120,
        },
        calls_weather,
    ),
    "tools left alone": (
        "chat",
        {"messages": QUESTION, "tools": [WEATHER], "tool_choice": "none", "max_tokens": 12},
        says,
    ),
    "the result of a call": ("chat", {"messages": RESULT, "tools": [WEATHER], "max_tokens": 20}, bool),
    "a text to continue": ("text", {"prompt": "The capital of Norway is", "max_tokens": 8}, says),
    "several texts": (
        "text",
        {"prompt": ["One, two,", "A, B,"], "max_tokens": 6, "n": 2, "seed": 3, "temperature": 1},
        lambda answers: len(answers) == 4,
    ),
    "token ids": ("text", {"prompt": [504, 3575, 282], "max_tokens": 6}, says),
    "echo and logprobs": (
        "text",
        {"prompt": "The capital of Norway is", "echo": True, "logprobs": 2, "max_tokens": 4},
        lambda answers: answers[0][0].startswith("The capital of Norway is"),
    ),
    "a response": ("responses", {"input": "What is the capital of Norway?", "max_output_tokens": 12}, says),
    "instructions": (
        "responses",
        {"input": TALK[1:3] + QUESTION, "instructions": "Answer in one word.", "max_output_tokens": 12},
        says,
    ),
    "a response of a schema": (
        "responses",
        {"input": CITY, "text": FLAT_FORM, "max_output_tokens": 250},
        is_a_city,
    ),
    "a response that calls": (
        "responses",
        {
            "input": FLAT_RESULT[:1],
            "tools": FLAT,
            "tool_choice": {"type": "function", "name": "weather"},
            "max_output_tokens": 120,
        },
        calls_weather,
    ),
    "the output of a call": (
        "responses",
        {"input": FLAT_RESULT, "tools": FLAT, "max_output_tokens": 20},
        bool,
    ),
    "a response that is cut": (
        "responses",
        {"input": "Count to ten.", "max_output_tokens": 2},
        lambda answers: answers[0][2] == "incomplete",
    ),
}


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    server = Real()
    yield server
    server.close()


@pytest.mark.parametrize("name", TYPICAL)
def test_whole_and_streamed(real: Real, name: str) -> None:
    """Two calls each; what is sampled greedily or by a seed is the same text."""
    endpoint, fields, as_wanted = TYPICAL[name]
    asked = {"model": MODEL, "temperature": 0} | fields
    whole, streamed = (ask(real.client, **asked) for ask in CLIENTS[endpoint])
    assert as_wanted(whole), whole
    assert streamed == whole


@pytest.fixture(scope="module")
def langchain(real: Real) -> Any:
    openai_models = pytest.importorskip("langchain_openai", reason="comes with the extra 'test'")
    url = str(real.client.base_url)
    return openai_models.ChatOpenAI(model=MODEL, base_url=url, api_key="none", temperature=0, max_retries=0)


def of_langchain(message: Any) -> Answer:
    calls = [(call["name"], json.dumps(call["args"])) for call in message.tool_calls]
    return message.text, calls, message.response_metadata["finish_reason"]


#: LangChain takes the first of several choices, needs "metadata" for itself, and wants JSON that is whole
NOT_LANGCHAINS = ("choices", "bookkeeping", "any JSON")


@pytest.mark.parametrize(
    "name", [name for name, call in TYPICAL.items() if call[0] == "chat" and name not in NOT_LANGCHAINS]
)
def test_langchain_is_answered_the_same(real: Real, langchain: Any, name: str) -> None:
    """The calls to chat once more, by another reading of the protocol."""
    _, fields, _ = TYPICAL[name]
    (said,) = chat(real.client, **{"model": MODEL, "temperature": 0} | fields)
    text, calls, finish = said
    wanted = text, [(called, json.dumps(json.loads(arguments))) for called, arguments in calls], finish
    more = {key: value for key, value in fields.items() if key != "messages"}
    model = langchain.bind(**more)
    assert of_langchain(model.invoke(fields["messages"])) == wanted
    first, *others = model.stream(fields["messages"])
    for chunk in others:
        first += chunk
    assert of_langchain(first) == wanted
