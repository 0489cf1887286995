"""/v1/responses, as the official client sees it and raw; and the two endpoints about tokens."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.server.conftest import Served
from tests.server.fake import BOS
from tests.server.test_errors_api import check_error
from tests.server.test_generation_api import ANSWER


def respond(served: Served, **fields: Any) -> Any:
    return served.post("/v1/responses", {"input": "hi"} | fields)


def prompt_of(served: Served) -> str:
    return bytes(served.engine.streams[-1].request.prompt_token_ids[1:]).decode()


def typed_events(served: Served, **fields: Any) -> list[dict[str, Any]]:
    raw = respond(served, stream=True, **fields).content
    assert raw.endswith(b"\n\n")
    found = []
    for block in raw.split(b"\n\n")[:-1]:
        name, data = block.split(b"\n")
        content = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: " + content["type"].encode()
        found.append(content)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def test_a_response(served: Served) -> None:
    reply = served.openai.responses.create(
        model="fake-model", input="hi", instructions="be brief", store=True
    )
    assert reply.output_text == ANSWER
    assert (reply.status, reply.object, reply.error) == ("completed", "response", None)
    assert reply.id.startswith("resp_")
    assert reply.usage is not None
    assert reply.usage.output_tokens == len(ANSWER.encode())
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    assert reply.usage.input_tokens_details.cached_tokens == 16
    assert prompt_of(served) == "<system>be brief<user>hi<assistant>"
    assert served.engine.streams[-1].request.params.max_tokens is None


def test_a_response_brings_its_figures_on_request(served: Served) -> None:
    body = {"input": "hi", "return_metrics": True}
    metrics = served.post("/v1/responses", body).json()["metrics"]
    assert metrics["speculative_decoding"]["num_draft_tokens"] == 13
    assert "metrics" not in served.post("/v1/responses", {"input": "hi"}).json()
    events = served.post("/v1/responses", body | {"stream": True}).text.split("\n\n")
    told = [json.loads(each.partition("data: ")[2])["response"] for each in events if '"response":' in each]
    assert [("metrics" in each) for each in told] == [False, False, True]


def test_a_conversation_is_sent_whole_each_time(served: Served) -> None:
    first = served.openai.responses.create(model="fake-model", input="one")
    turns = [
        {"role": "developer", "content": "rules"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "one"}]},
        first.output[0].model_dump(),
        {"role": "user", "content": "two"},
    ]
    served.openai.responses.create(model="fake-model", input=turns)  # type: ignore[arg-type]
    assert prompt_of(served) == f"<system>rules<user>one<assistant>{ANSWER}<user>two<assistant>"


def test_a_response_that_is_cut(served: Served) -> None:
    reply = served.openai.responses.create(model="fake-model", input="hi", max_output_tokens=5)
    assert reply.status == "incomplete"
    assert reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    assert typed_events(served, max_output_tokens=5)[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize("width", [1, 3, 1000])
def test_a_streamed_response_is_the_whole_one(served: Served, width: int) -> None:
    served.engine.tokens_per_step = width
    found = typed_events(served, include=["message.output_text.logprobs"], top_logprobs=2)
    kinds = [event["type"].removeprefix("response.") for event in found]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    deltas = found[4:-4]
    assert "".join(event["delta"] for event in deltas) == found[-4]["text"] == ANSWER
    logprobs = [entry for event in deltas for entry in event["logprobs"]]
    assert logprobs == found[-4]["logprobs"]
    assert bytes(byte for entry in logprobs for byte in entry["bytes"]).decode() == ANSWER
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)
    whole = respond(served, include=["message.output_text.logprobs"], top_logprobs=2).json()
    body = found[-1]["response"]
    assert body["usage"] == whole["usage"]
    assert body["output"][0]["content"] == whole["output"][0]["content"] == [found[-3]["part"]]
    assert {event["item_id"] for event in deltas} == {body["output"][0]["id"]}


def test_the_official_client_reads_the_stream(served: Served) -> None:
    with served.openai.responses.stream(model="fake-model", input="hi") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == ANSWER


def test_a_failure_in_the_stream_and_before_it(served: Served) -> None:
    served.engine.fail_after = 20
    last = typed_events(served)[-1]
    assert last["type"] == "error"
    assert "not finite" in last["message"]
    with pytest.raises(openai.APIError):
        list(served.openai.responses.create(model="fake-model", input="hi", stream=True))
    served.engine.fail_after = 0
    assert respond(served, stream=True).status_code == 500


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": [{"role": "user", "content": None}]}, "input"),
        ({"input": [{"role": "user", "content": "a"}] * 2}, "input"),
        ({"input": "x" * 600}, "input"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"n": 2}, "n"),
        ({"max_tokens": 2}, "max_tokens"),
        ({"temperature": 9}, "temperature"),
    ],
    ids=str,
)
def test_what_is_not_served_is_refused(served: Served, fields: dict[str, Any], param: str) -> None:
    served.engine.max_model_len = 512
    for stream in (False, True):
        reply = respond(served, stream=stream, **fields)
        if fields.get("max_output_tokens") == 5000:
            assert reply.status_code == 400
        else:
            check_error(reply, 400, param)
    assert respond(served).status_code == 200


def test_neutral_fields_of_the_responses_endpoint(served: Served) -> None:
    neutral = {
        "store": True, "truncation": "disabled", "background": False, "metadata": {"a": "b"}, "tools": [],
        "text": {"format": {"type": "text"}, "verbosity": "medium"}, "parallel_tool_calls": True,
        "previous_response_id": None, "reasoning": None, "service_tier": "auto", "tool_choice": "auto",
    }  # fmt: skip
    reply = respond(served, **neutral)
    assert reply.status_code == 200
    assert "x-ignored-fields" not in reply.headers
    assert reply.json()["store"] is False


# ---- /tokenize and /detokenize


def test_tokens_of_a_text_and_back(served: Served) -> None:
    reply = served.post("/tokenize", {"prompt": "Grüße", "return_token_strs": True}).json()
    assert reply["tokens"] == [BOS, *"Grüße".encode()]
    assert reply["count"] == 8
    assert reply["max_model_len"] == 512
    assert reply["token_strs"][:4] == ["<s>", "G", "r", "\ufffd"]
    assert served.post("/detokenize", {"tokens": reply["tokens"]}).json() == {"prompt": "<s>Grüße"}
    bare = served.post("/tokenize", {"prompt": "", "add_special_tokens": False}).json()
    assert (bare["count"], bare["tokens"], bare["token_strs"]) == (0, [], None)
    assert served.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


def test_tokens_of_a_conversation_are_what_chat_counts(served: Served) -> None:
    """Also: one start token, not two."""
    messages = [{"role": "user", "content": "hi"}]
    reply = served.post("/tokenize", {"messages": messages}).json()
    assert reply["count"] == served.chat(messages=messages).json()["usage"]["prompt_tokens"]
    assert reply["tokens"].count(BOS) == 1
    shorter = served.post("/tokenize", {"messages": messages, "add_generation_prompt": False}).json()
    assert shorter["count"] == reply["count"] - len("<assistant>")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}, None),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": "a"}] * 2}, "messages"),
        ("/tokenize", {"prompt": "x" * 3_000_000}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["a"] * 10_000}, "tokens[0]"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_wrong_questions_about_tokens(served: Served, path: str, body: Any, param: str | None) -> None:
    check_error(served.post(path, body), 400, param)
    check_error(served.post("/tokenize", {"prompt": "a", "model": "other"}), 404, "model", "model_not_found")
