"""Typical calls of the official client, and of LangChain's where that is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import openai
import pytest

from tests.server.conftest import Served
from tests.server.fake import TEXT
from tests.server.test_generation_api import ANSWER

MODEL = "fake-model"
HI: Any = [{"role": "user", "content": "hi"}]
TALK: Any = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": [{"type": "text", "text": "three"}]},
]


def chat(client: openai.OpenAI, **fields: Any) -> str | None:
    fields = {"model": MODEL, "messages": HI} | fields
    reply = client.chat.completions.create(**fields)
    assert reply.usage is not None
    assert reply.usage.completion_tokens > 0
    return reply.choices[0].message.content


def chat_stream(client: openai.OpenAI, **fields: Any) -> str:
    fields = {"model": MODEL, "messages": HI} | fields
    chunks = list(client.chat.completions.create(stream=True, **fields))
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def text(client: openai.OpenAI, **fields: Any) -> str:
    fields = {"model": MODEL, "prompt": "hi", "max_tokens": 400} | fields
    return client.completions.create(**fields).choices[0].text


def text_stream(client: openai.OpenAI, **fields: Any) -> str:
    fields = {"model": MODEL, "prompt": "hi", "max_tokens": 400} | fields
    return "".join(c.choices[0].text for c in client.completions.create(stream=True, **fields) if c.choices)


CHAT_FIELDS: list[dict[str, Any]] = [
    {},
    {"messages": TALK},
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9},
    {"max_tokens": 400},
    {"max_completion_tokens": 400},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logit_bias": {"50": -100}},
    {"user": "someone", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 5},
    {"response_format": {"type": "text"}},
    {"parallel_tool_calls": True, "prediction": {"type": "content", "content": "x"}},
    {"stop": ["never to be found"]},
    {"extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}},
    {"extra_body": {"chat_template_kwargs": {}, "add_generation_prompt": True}},
    {"extra_headers": {"X-Request-Id": "a-b"}, "timeout": 5},
]
TEXT_FIELDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0, "max_tokens": 200},
    {"logprobs": 3},
    {"prompt": [1, 2, 3]},
    {"stop": "never to be found"},
    {"extra_body": {"bad_words": ["x"], "return_token_ids": True, "priority": 1}},
]


@pytest.mark.parametrize("fields", CHAT_FIELDS, ids=str)
def test_chats_of_the_official_client(served: Served, fields: dict[str, Any]) -> None:
    assert chat(served.openai, **fields) == chat_stream(served.openai, **fields) == ANSWER


@pytest.mark.parametrize("fields", TEXT_FIELDS, ids=str)
def test_completions_of_the_official_client(served: Served, fields: dict[str, Any]) -> None:
    assert text(served.openai, **fields) == text_stream(served.openai, **fields) == ANSWER


def test_seeds_choices_and_echo_of_the_official_client(served: Served) -> None:
    reply = served.openai.chat.completions.create(model=MODEL, messages=HI, seed=3, n=2)
    texts = [choice.message.content for choice in reply.choices]
    assert texts == [TEXT.format(choice=index, seed=3) for index in (0, 1)]
    assert text(served.openai, echo=True) == "hi" + ANSWER
    assert text(served.openai, echo=True, max_tokens=0) == "hi"
    batch = served.openai.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=400)
    assert [choice.index for choice in batch.choices] == [0, 1]


def test_streaming_helpers_of_the_official_client(served: Served) -> None:
    with served.openai.chat.completions.stream(model=MODEL, messages=HI) as stream:
        said = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert said == final.choices[0].message.content == ANSWER
    raw = served.openai.chat.completions.with_raw_response.create(model=MODEL, messages=HI)
    assert raw.parse().choices[0].message.content == ANSWER


async def test_the_asynchronous_client(served: Served) -> None:
    async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="k", max_retries=0) as client:

        async def one() -> str | None:
            return (await client.chat.completions.create(model=MODEL, messages=HI)).choices[0].message.content

        async def other() -> str:
            stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True)
            return "".join([c.choices[0].delta.content or "" async for c in stream])

        assert await asyncio.gather(one(), other(), one(), other()) == [ANSWER] * 4
        assert MODEL in [model.id async for model in client.models.list()]


@pytest.mark.parametrize(
    ("error", "call"),
    [
        (openai.BadRequestError, lambda client: chat(client, temperature=9)),
        (openai.BadRequestError, lambda client: chat(client, messages=[])),
        (openai.NotFoundError, lambda client: chat(client, model="gpt-9")),
        (openai.NotFoundError, lambda client: client.embeddings.create(model=MODEL, input="a")),
        (openai.NotFoundError, lambda client: client.models.retrieve("gpt-9")),
        (openai.BadRequestError, lambda client: chat_stream(client, top_p=0)),
    ],
)
def test_errors_of_the_official_client(
    served: Served, error: type[openai.APIStatusError], call: Callable[[openai.OpenAI], Any]
) -> None:
    with pytest.raises(error) as caught:
        call(served.openai)
    assert caught.value.body


@pytest.mark.long
def test_langchain(served: Served) -> None:
    """Its own reading of the protocol: whole, streamed, in batches, asynchronous."""
    langchain = pytest.importorskip("langchain_openai", reason="not among the pinned packages")
    model = langchain.ChatOpenAI(model=MODEL, base_url=f"{served.url}/v1", api_key="k", max_retries=0)
    talk = [("system", "be brief"), ("human", "one"), ("ai", "two"), ("human", "three")]
    assert model.invoke("hi").content == model.invoke(talk).content == ANSWER
    assert model.invoke("hi").usage_metadata["output_tokens"] == len(ANSWER.encode())
    assert "".join(chunk.content for chunk in model.stream(talk)) == ANSWER
    assert [reply.content for reply in model.batch(["a", "b", "c"])] == [ANSWER] * 3
    assert model.bind(stop=["quick"]).invoke("hi").content == ANSWER.split("quick")[0]
    assert model.bind(logprobs=True, top_logprobs=2).invoke("hi").response_metadata["logprobs"]["content"]
    assert asyncio.run(model.ainvoke("hi")).content == ANSWER
    old = langchain.OpenAI(
        model=MODEL, base_url=f"{served.url}/v1", api_key="k", max_retries=0, max_tokens=400
    )
    assert old.invoke("hi") == "".join(old.stream("hi")) == ANSWER
    newer = langchain.ChatOpenAI(
        model=MODEL, base_url=f"{served.url}/v1", api_key="k", max_retries=0, use_responses_api=True
    )
    assert newer.invoke("hi").text == "".join(chunk.text for chunk in newer.stream("hi")) == ANSWER
