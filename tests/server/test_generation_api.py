"""Both generating endpoints, whole and streamed, as the official client and a raw one see them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.conftest import Served
from tests.server.fake import TEXT

ANSWER = TEXT.format(choice=0, seed=None)
LONG_CHAT = {"messages": [{"role": "user", "content": "hi"}], "model": "fake-model"}


def events(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All events of a stream, checked for what every stream has."""
    with served.client.stream("POST", path, json=body | {"stream": True}) as response:
        raw = response.read()
        assert response.status_code == 200, raw
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
    lines = [line for line in raw.split(b"\n\n") if line]
    assert all(line.startswith(b"data: ") for line in lines)
    assert lines.pop() == b"data: [DONE]"
    found = [json.loads(line[6:]) for line in lines]
    assert len({event["id"] for event in found if "error" not in event}) == 1
    return found


def text_of(found: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for event in found for choice in event["choices"] if choice["index"] == index]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices
    )


def test_models(served: Served) -> None:
    names = [model.id for model in served.openai.models.list()]
    assert names == ["fake-model", "alias/of-it"]
    model = served.openai.models.retrieve("alias/of-it")
    assert model.id == "alias/of-it"
    assert model.max_model_len == 512  # type: ignore[attr-defined]
    assert served.client.get("/v1/models/other").json()["error"]["code"] == "model_not_found"


def test_completion(served: Served) -> None:
    reply = served.openai.completions.create(model="fake-model", prompt="hello", max_tokens=200)
    assert reply.id.startswith("cmpl-")
    assert reply.object == "text_completion"
    assert reply.model == "fake-model"
    assert reply.system_fingerprint is not None
    (choice,) = reply.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, ANSWER, "stop", None)
    usage = reply.usage
    assert usage is not None
    assert usage.prompt_tokens == 6
    assert usage.completion_tokens == len(ANSWER.encode())
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 16
    details = usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens
    assert details.rejected_prediction_tokens


def test_completion_defaults_to_sixteen_tokens(served: Served) -> None:
    reply = served.openai.completions.create(model="fake-model", prompt="hello")
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 16


def test_chat(served: Served) -> None:
    reply = served.openai.chat.completions.create(
        model="alias/of-it",
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        ],
        user="someone",
        metadata={"a": "b"},
        store=False,
    )
    assert reply.id.startswith("chatcmpl-")
    assert reply.object == "chat.completion"
    assert reply.model == "alias/of-it"
    (choice,) = reply.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == ANSWER
    assert choice.finish_reason == "stop"
    request = served.engine.streams[-1].request
    assert bytes(request.prompt_token_ids[1:]).decode() == "<system>be brief<user>one\ntwo<assistant>"
    assert request.params.max_tokens is None


def test_chat_accepts_what_clients_send_back(served: Served) -> None:
    first = served.openai.chat.completions.create(
        model="fake-model", messages=[{"role": "user", "content": "a"}]
    )
    messages = [
        {"role": "user", "content": "a"},
        first.choices[0].message.model_dump(),
        {"role": "user", "content": "b"},
    ]
    assert served.chat(messages=messages).status_code == 200


def test_chat_template_variables(served: Served) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    reply = served.chat(
        messages=messages,
        continue_final_message=True,
        add_generation_prompt=False,
        chat_template_kwargs={"thinking": False},
    )
    assert reply.status_code == 200
    prompt = bytes(served.engine.streams[-1].request.prompt_token_ids[1:]).decode()
    assert prompt == "<user>a<assistant>b[thinking=False]"


def test_parameters_reach_the_engine(served: Served) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 1,
        "frequency_penalty": -1, "repetition_penalty": 1.1, "logit_bias": {"5": -100, "6": 1.5},
        "min_tokens": 2, "max_tokens": 9, "stop": ["x", "y"], "stop_token_ids": [1, 2],
        "ignore_eos": True, "seed": 42, "n": 2,
    }  # fmt: skip
    assert served.complete(**fields, cache_salt="s", num_speculative_tokens=3).status_code == 200
    request = served.engine.streams[-1].request
    expected = fields | {"logit_bias": {5: -100.0, 6: 1.5}, "stop": ("x", "y"), "stop_token_ids": (1, 2)}
    assert {name: getattr(request.params, name) for name in fields} == expected
    assert (request.cache_salt, request.speculative_tokens) == ("s", 3)


def test_nulls_mean_defaults(served: Served) -> None:
    nulls = dict.fromkeys(
        ["temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream", "stream_options", "logprobs",
         "tools", "echo", "suffix", "best_of", "response_format", "user"]
    )  # fmt: skip
    reply = served.complete(**nulls)
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"][0]["text"] == ANSWER


def test_neutral_values_of_unsupported_fields(served: Served) -> None:
    assert served.complete(echo=False, best_of=1, suffix="").status_code == 200
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert served.chat(response_format={"type": "text"}, tools=tools, tool_choice="none").status_code == 200


@pytest.mark.parametrize(
    ("prompt", "count"), [("a", 1), (["a", "b", "c"], 3), ([1, 2, 3], 1), ([[1, 2], [3]], 2)]
)
def test_prompt_forms(served: Served, prompt: Any, count: int) -> None:
    reply = served.complete(prompt=prompt, n=2).json()
    assert [choice["index"] for choice in reply["choices"]] == list(range(2 * count))
    texts = [TEXT.format(choice=index % 2, seed=None) for index in range(2 * count)]
    assert [choice["text"] for choice in reply["choices"]] == texts
    assert reply["usage"]["completion_tokens"] == sum(len(text.encode()) for text in texts)


def test_stop_and_seed(served: Served) -> None:
    reply = served.openai.completions.create(
        model="fake-model", prompt="a", max_tokens=200, stop="quick", seed=7
    )
    choice = reply.choices[0]
    assert choice.text == TEXT.format(choice=0, seed=7).split("quick")[0]
    assert choice.finish_reason == "stop"
    assert choice.stop_reason == "quick"  # type: ignore[attr-defined]


def test_chat_stream(served: Served) -> None:
    stream = served.openai.chat.completions.create(**LONG_CHAT, stream=True, n=2)  # type: ignore[call-overload]
    chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    for index in (0, 1):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert own[0].delta.content == ""
        assert [choice.finish_reason for choice in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == "stop"
        assert own[-1].delta.content is None
        text = "".join(choice.delta.content or "" for choice in own)
        assert text == TEXT.format(choice=index, seed=None)
    # The choices come side by side, not one after the other.
    order = [chunk.choices[0].index for chunk in chunks]
    assert order != sorted(order)


def test_completion_stream_equals_whole(served: Served) -> None:
    for width in (1, 2, 3, 7, 1000):
        served.engine.tokens_per_step = width
        found = events(served, "/v1/completions", {"prompt": ["a", "b"], "max_tokens": 400, "n": 2})
        whole = served.complete(prompt=["a", "b"], n=2).json()["choices"]
        assert [text_of(found, index) for index in range(4)] == [choice["text"] for choice in whole]
        for index in range(4):
            reasons = [c["finish_reason"] for e in found for c in e["choices"] if c["index"] == index]
            assert [reason for reason in reasons if reason] == ["stop"]
            assert reasons[-1] == "stop"
        assert all("usage" not in event for event in found)


def test_stream_usage(served: Served) -> None:
    options = {"stream_options": {"include_usage": True}}
    for path, body in (("/v1/chat/completions", LONG_CHAT), ("/v1/completions", {"prompt": "a"})):
        found = events(served, path, body | options)
        assert all(event["usage"] is None for event in found[:-1])
        assert found[-1]["choices"] == []
        whole = served.post(path, body).json()
        assert found[-1]["usage"] == whole["usage"]


def test_continuous_usage(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events(served, "/v1/chat/completions", LONG_CHAT | {"stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in found]
    assert counts == sorted(counts)
    assert counts[-1] == len(ANSWER.encode())


def test_completion_logprobs(served: Served) -> None:
    reply = served.complete(logprobs=2).json()["choices"][0]
    logprobs = reply["logprobs"]
    count = len(ANSWER.encode())
    assert {name: len(values) for name, values in logprobs.items()} == dict.fromkeys(
        ["tokens", "token_logprobs", "top_logprobs", "text_offset"], count
    )
    # "Grü": the two halves of ü share an offset.
    assert logprobs["text_offset"][:5] == [0, 1, 2, 2, 3]
    assert logprobs["text_offset"][-1] == len(ANSWER) - 1
    assert logprobs["tokens"][0] == "G"
    assert all(token in top for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True))
    found = events(served, "/v1/completions", {"prompt": "hi", "max_tokens": 400, "logprobs": 2})
    pieces = [e["choices"][0]["logprobs"] for e in found if e["choices"][0]["logprobs"]]
    assert {name: [x for piece in pieces for x in piece[name]] for name in logprobs} == logprobs
    assert len(served.complete(logprobs=0).json()["choices"][0]["logprobs"]["tokens"]) == count


def test_chat_logprobs(served: Served) -> None:
    content = served.chat(logprobs=True, top_logprobs=3).json()["choices"][0]["logprobs"]["content"]
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == ANSWER
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert all(set(entry) == {"token", "logprob", "bytes", "top_logprobs"} for entry in content)
    found = events(served, "/v1/chat/completions", LONG_CHAT | {"logprobs": True, "top_logprobs": 3})
    streamed = [
        e for event in found for c in event["choices"] if c["logprobs"] for e in c["logprobs"]["content"]
    ]
    assert streamed == content
    plain = served.chat(logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in plain)


def test_role_comes_with_the_first_token(served: Served) -> None:
    served.engine.prefill = 0.2
    with served.client.stream("POST", "/v1/chat/completions", json=LONG_CHAT | {"stream": True}) as response:
        first = next(response.iter_raw())
    assert response.elapsed.total_seconds() > 0.15
    assert b'"role":"assistant"' in first
    assert b'"content":"Gr' in first


def test_failure_in_a_stream(served: Served) -> None:
    served.engine.fail_after = 20
    found = events(served, "/v1/chat/completions", LONG_CHAT)
    assert found[-1]["error"]["type"] == "server_error"
    assert "not finite" in found[-1]["error"]["message"]
    assert served.chat().status_code == 500
    served.engine.fail_after = 0
    reply = served.chat(stream=True)
    assert reply.status_code == 500
    assert reply.json()["error"]["code"] == "internal_error"


def test_keep_alive_comments(serve: Any) -> None:
    served = serve(sse_keep_alive_interval=0.05)
    served.engine.prefill = 0.3
    body = served.chat(stream=True)
    assert body.content.startswith(b": keep-alive\n\n: keep-alive\n\n")
    assert body.content.endswith(b"data: [DONE]\n\n")
    with served.openai.chat.completions.create(**LONG_CHAT, stream=True) as stream:
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER
