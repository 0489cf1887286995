"""Forms and tools on the default model, over HTTP, many at once, with speculation on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import uvloop

from engine.outputs import NullObserver
from server.app import create_app
from server.context import ServerContext
from server.metrics import Metrics
from server.process import HttpServer
from server.settings import Settings
from server.startup import bind
from server.wiring import build_engine
from tests.server.conftest import wait_until

pytestmark = [pytest.mark.model, pytest.mark.slow]

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 24},
        "kind": {"enum": ["capital", "town", "village"]},
        "inhabitants": {"type": "integer", "minimum": 1, "maximum": 40000000},
        "rivers": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 2},
        "coastal": {"type": "boolean"},
    },
    "required": ["city", "kind", "inhabitants", "rivers", "coastal"],
    "additionalProperties": False,
}
FORM: Any = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 24}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
MODEL = "SmolLM2-135M-Instruct"


class Real:
    """A server in a thread, with the default model and its drafter."""

    def __init__(self) -> None:
        settings = Settings(max_model_len=1024, num_pages=1024, threads=1, verify_policy="fixed:4")
        self.context = ServerContext(settings, Metrics("", MODEL, 0))
        self.engine = build_engine(settings, NullObserver(), print)
        self.context.engine = self.engine
        listener = bind("127.0.0.1", 0)
        self.server = HttpServer(create_app(self.context), settings)
        self.loop = uvloop.new_event_loop()
        self.client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{listener.getsockname()[1]}/v1", api_key="none", timeout=120
        )
        self.pool = ThreadPoolExecutor(17)
        self.run = self.pool.submit(self._run, listener)
        wait_until(lambda: self.server.started, 30)

    def _run(self, listener: Any) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self.engine.start())
        self.loop.run_until_complete(self.server.serve(sockets=[listener]))
        self.loop.run_until_complete(self.engine.drain(1))

    def chat(self, question: str, **fields: Any) -> Any:
        messages: Any = [{"role": "user", "content": question}]
        return self.client.chat.completions.create(
            **{"model": MODEL, "messages": messages, "max_tokens": 250} | fields
        )

    def close(self) -> None:
        self.client.close()
        self.server.should_exit = True
        self.run.result(30)
        self.context.close()
        self.pool.shutdown()


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    server = Real()
    yield server
    server.close()


def conforms(text: str) -> bool:
    value = json.loads(text)
    return (
        list(value) == SCHEMA["required"]
        and len(value["city"]) <= 24
        and value["kind"] in ("capital", "town", "village")
        and 1 <= value["inhabitants"] <= 40000000
        and len(value["rivers"]) <= 2
        and type(value["coastal"]) is bool
    )


CITIES = ("Paris", "Rome", "Oslo", "Lima", "Cairo", "Quito")


def test_json_of_a_schema_under_load(real: Real) -> None:
    """Greedy, seeded and sampled, among requests of no form, with and without drafts."""

    def ask(i: int) -> tuple[int, str, str]:
        how: dict[str, Any] = [{"temperature": 0}, {"seed": i}, {"temperature": 1.3}][i % 3]
        form = {"response_format": FORM} if i % 4 else {}
        reply = real.chat(
            f"Tell me about {CITIES[i % 6]}, as JSON.", **how, **form, max_tokens=250 if i % 4 else 40
        )
        return i, reply.choices[0].message.content, reply.choices[0].finish_reason

    answers = list(real.pool.map(ask, range(16)))
    for i, text, finish in answers:
        if i % 4:
            assert finish == "stop"
            assert conforms(text), text


@pytest.mark.parametrize(
    "how", [{"temperature": 0}, {"seed": 11}, {"seed": 5, "top_p": 0.8, "frequency_penalty": 0.5}]
)
def test_the_text_is_the_same_without_drafts_and_when_streamed(real: Real, how: dict[str, Any]) -> None:
    ask = {"response_format": FORM, **how}
    text = real.chat("Describe Oslo as JSON.", **ask).choices[0].message.content
    plain = real.chat("Describe Oslo as JSON.", **ask, extra_body={"num_speculative_tokens": 0})
    assert plain.choices[0].message.content == text
    assert plain.usage.completion_tokens_details.accepted_prediction_tokens == 0
    stream = real.chat("Describe Oslo as JSON.", **ask, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
    assert conforms(text)


def test_other_forms(real: Real) -> None:
    def outputs(**form: Any) -> str:
        reply = real.chat("Is the sky blue?", temperature=1, extra_body={"structured_outputs": form})
        assert reply.choices[0].finish_reason == "stop"
        return str(reply.choices[0].message.content)

    assert outputs(choice=["yes", "no", "perhaps"]) in ("yes", "no", "perhaps")
    assert outputs(regex="[0-9]{4}-[0-9]{2}").replace("-", "").isdigit()
    assert outputs(grammar='start: "<" /[a-z]{1,9}/ ">"').strip("<>").islower()
    assert isinstance(
        json.loads(outputs(json={"type": "array", "items": {"type": "boolean"}, "maxItems": 3})), list
    )


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_that_must_be_made_are_made(real: Real, choice: Any, stream: bool) -> None:
    ask = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    for how in ({"temperature": 0}, {"seed": 3}, {"temperature": 1.2}):
        reply = real.chat("What is the weather in Oslo?", **ask, **how, stream=stream)
        if stream:
            deltas = [chunk.choices[0] for chunk in reply]
            calls = [call for each in deltas for call in each.delta.tool_calls or []]
            arguments, finish = "".join(call.function.arguments for call in calls), deltas[-1].finish_reason
            assert len(calls) > 3, "not streamed as they came"
            assert calls[0].function.name == "weather"
            assert not any(each.delta.content for each in deltas)
        else:
            (call,) = reply.choices[0].message.tool_calls
            arguments, finish = call.function.arguments, reply.choices[0].finish_reason
            assert reply.choices[0].message.content is None
        assert finish == "tool_calls"
        value = json.loads(arguments)
        assert set(value) == {"city", "unit"}
        assert value["unit"] in ("C", "F")


def test_a_conversation_with_a_call_goes_on(real: Real) -> None:
    first = real.chat(
        "What is the weather in Oslo?",
        tools=[WEATHER],
        tool_choice="required",
        temperature=0,
        parallel_tool_calls=False,
    )
    message = first.choices[0].message
    messages = [
        {"role": "user", "content": "What is the weather in Oslo?"},
        message.model_dump(),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "rain, 7 C"},
    ]
    second = real.chat("", messages=messages, tools=[WEATHER], temperature=0, max_tokens=60)
    assert second.choices[0].finish_reason in ("stop", "length", "tool_calls")
