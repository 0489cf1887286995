"""What OpenAI-compatible servers offer beyond the basics: echo, scored prompts, token ids, names, keys."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from server.context import ServerContext
from server.metrics import Metrics
from server.settings import Settings
from tests.server.conftest import Served, wait_until
from tests.server.fake import BOS, TEXT, FakeEngine
from tests.server.test_errors_api import check_error
from tests.server.test_generation_api import ANSWER, LONG_CHAT, events, text_of

Serve = Callable[..., Served]
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def streamed(served: Served, body: dict[str, Any], index: int = 0) -> dict[str, Any]:
    """A choice of a streamed completion, put together: text, logprobs, token ids."""
    found = events(served, "/v1/completions", body)
    choices = [choice for event in found for choice in event["choices"] if choice["index"] == index]
    pieces = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    return {
        "text": text_of(found, index),
        "logprobs": {name: [entry for piece in pieces for entry in piece[name]] for name in LISTS},
        "token_ids": [token for choice in choices for token in choice.get("token_ids", ())],
        "prompt_token_ids": [
            choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice
        ],
    }


# ---- echo


def test_echo_puts_each_prompt_before_its_choices(served: Served) -> None:
    body = {"prompt": ["Hello, ", "«é» "], "n": 2, "echo": True, "max_tokens": 400}
    choices = served.post("/v1/completions", body).json()["choices"]
    expected = [
        prompt + TEXT.format(choice=choice, seed=None) for prompt in body["prompt"] for choice in (0, 1)
    ]
    assert [choice["text"] for choice in choices] == expected
    for index, text in enumerate(expected):
        assert streamed(served, body, index)["text"] == text


def test_echo_of_token_ids(served: Served) -> None:
    ids = [BOS, *"Grüße".encode(), 0xFF]
    assert served.complete(prompt=ids, echo=True).json()["choices"][0]["text"] == "Grüße\ufffd" + ANSWER
    shown = served.complete(prompt=ids, echo=True, skip_special_tokens=False).json()["choices"][0]["text"]
    assert shown.startswith("<s>Grüße\ufffd")


@pytest.mark.parametrize("prompt", ["Grüße! ", [BOS, 72, 105, 0xC3, 0xA9, 33], [0xC3]])
@pytest.mark.parametrize("max_tokens", [0, 1, 400])
@pytest.mark.parametrize("logprobs", [0, 1, 2])
def test_echo_with_logprobs(served: Served, prompt: Any, max_tokens: int, logprobs: int) -> None:
    """One entry a token, offsets that point into the text, and the same when streamed."""
    body = {"prompt": prompt, "echo": True, "logprobs": logprobs, "max_tokens": max_tokens}
    reply = served.post("/v1/completions", body).json()
    choice = reply["choices"][0]
    lists = choice["logprobs"]
    count = reply["usage"]["prompt_tokens"] + reply["usage"]["completion_tokens"]
    assert {name: len(values) for name, values in lists.items()} == dict.fromkeys(LISTS, count)
    assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
    assert all(value is not None for value in lists["token_logprobs"][1:])
    for token, offset in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert token in ("<s>", "\ufffd") or choice["text"][offset : offset + len(token)] == token
    assert lists["text_offset"] == sorted(lists["text_offset"])
    again = streamed(served, body)
    assert (again["text"], again["logprobs"]) == (choice["text"], lists)


def test_a_prompt_alone_is_scored(served: Served) -> None:
    """The trigger on which other servers crash."""
    body = {"prompt": "Your answer: Yes", "echo": True, "max_tokens": 0, "logprobs": 1}
    reply = served.post("/v1/completions", body).json()
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Your answer: Yes", "length")
    assert choice["logprobs"]["tokens"] == ["<s>", *"Your answer: Yes"]
    assert reply["usage"]["completion_tokens"] == 0


# ---- prompt_logprobs


def test_prompt_logprobs_of_a_completion(served: Served) -> None:
    choice = served.complete(prompt=[5, 6, 7], prompt_logprobs=1, n=2).json()["choices"][1]
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert second == {
        "6": {"logprob": -1.5, "rank": 2, "decoded_token": "\x06"},
        "5": {"logprob": -0.5, "rank": 1, "decoded_token": "\x05"},
    }
    assert set(third) == {"7", "6"}
    assert choice["logprobs"] is None


def test_prompt_logprobs_of_a_chat(served: Served) -> None:
    reply = served.chat(prompt_logprobs=0, max_completion_tokens=0).json()
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in reply["prompt_logprobs"][1:])
    assert reply["choices"][0]["message"]["content"] == ""
    assert "prompt_logprobs" not in served.chat().json()


@pytest.mark.parametrize("fields", [{"prompt_logprobs": 20}, {"echo": True, "logprobs": 20}])
def test_reports_that_would_take_gigabytes_are_refused(served: Served, fields: dict[str, Any]) -> None:
    many = {"prompt": "x" * 400, "n": 128, "max_tokens": 1} | fields
    named = "prompt_logprobs" if "prompt_logprobs" in fields else "logprobs"
    check_error(served.post("/v1/completions", many), 400, named)
    assert served.post("/v1/completions", many | {"n": 8}).status_code == 200


def test_echo_and_prompt_logprobs_each_get_their_number(served: Served) -> None:
    body = {"prompt": [5, 6, 7], "echo": True, "logprobs": 0, "prompt_logprobs": 2}
    choice = served.complete(**body).json()["choices"][0]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:3]] == [1, 1]
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [2, 2]


# ---- token ids


def test_token_ids_of_a_completion(served: Served) -> None:
    body = {"prompt": "hé", "return_token_ids": True, "max_tokens": 400}
    choice = served.post("/v1/completions", body).json()["choices"][0]
    assert choice["prompt_token_ids"] == [BOS, *"hé".encode()]
    assert choice["token_ids"] == list(ANSWER.encode())
    for width in (1, 5):
        served.engine.tokens_per_step = width
        again = streamed(served, body)
        assert again["token_ids"] == choice["token_ids"]
        assert again["prompt_token_ids"] == [choice["prompt_token_ids"]]
    assert "token_ids" not in served.complete().json()["choices"][0]


def test_token_ids_of_a_chat(served: Served) -> None:
    body = LONG_CHAT | {"return_token_ids": True}
    reply = served.post("/v1/chat/completions", body).json()
    assert reply["choices"][0]["token_ids"] == list(ANSWER.encode())
    assert len(reply["prompt_token_ids"]) == reply["usage"]["prompt_tokens"]
    served.engine.tokens_per_step = 1
    found = events(served, "/v1/chat/completions", body)
    assert [event["prompt_token_ids"] for event in found if "prompt_token_ids" in event] == [
        reply["prompt_token_ids"]
    ]
    tokens = [token for event in found for token in event["choices"][0].get("token_ids", ())]
    assert tokens == reply["choices"][0]["token_ids"]


# ---- what reaches the engine


def test_restrictions_reach_the_engine(served: Served) -> None:
    fields = {"allowed_token_ids": [65, 66], "include_stop_str_in_output": True, "skip_special_tokens": False}
    assert served.complete(**fields, bad_words=["ab", " ab", "ä"], priority=-3).status_code == 200
    request = served.engine.streams[-1].request
    params = request.params
    assert params.allowed_token_ids == (65, 66)
    assert (params.include_stop_str_in_output, params.skip_special_tokens) == (True, False)
    assert set(params.bad_words) == {(97, 98), (32, 97, 98), (0xC3, 0xA4), (32, 0xC3, 0xA4)}
    assert request.priority == -3
    served.chat(bad_words=["x"])
    assert served.engine.streams[-1].request.params.bad_words == ((120,), (32, 120))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"prompt": "hello", "truncate_prompt_tokens": 2}, b"lo"),
        ({"prompt": "hello", "truncate_prompt_tokens": 99}, b"<s>hello"),
        ({"prompt": [1, 2, 3], "truncate_prompt_tokens": 1}, b"\x03"),
        ({"prompt": "x" * 3_000_000, "truncate_prompt_tokens": 5}, b"xxxxx"),
        ({"prompt": "x" * 600, "truncate_prompt_tokens": -1, "max_tokens": 12}, b"x" * 500),
        ({"prompt": "hello", "add_special_tokens": False}, b"hello"),
    ],
    ids=["text", "short", "ids", "long", "all", "bare"],
)
def test_the_end_of_a_long_prompt_is_kept(served: Served, fields: dict[str, Any], expected: bytes) -> None:
    assert served.complete(**({"max_tokens": 1} | fields)).status_code == 200
    ids = served.engine.streams[-1].request.prompt_token_ids
    assert b"".join(served.engine.tokenizer.token_bytes[i] for i in ids) == expected


def test_a_conversation_is_truncated_too(served: Served) -> None:
    assert served.chat(truncate_prompt_tokens=11).status_code == 200
    assert bytes(served.engine.streams[-1].request.prompt_token_ids) == b"<assistant>"
    echoed = served.complete(prompt="hello", truncate_prompt_tokens=2, echo=True, max_tokens=0).json()
    assert echoed["choices"][0]["text"] == "lo"


# ---- names and figures


def test_the_clients_own_id_need_not_be_unique(served: Served) -> None:
    """Two load testers that number their requests alike must not hurt each other."""
    served.engine.step_time = 0.01
    with ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda _: served.complete(request_id="req-0"), range(8)))
    assert {reply.status_code for reply in replies} == {200}
    assert {reply.json()["id"] for reply in replies} == {"cmpl-req-0"}
    assert served.chat(request_id="a").json()["id"] == "chatcmpl-a"
    assert len({stream.request.request_id for stream in served.engine.streams}) == 9


def test_a_request_may_ask_for_its_own_figures(served: Served) -> None:
    reply = served.chat(return_metrics=True).json()
    assert reply["metrics"]["time_to_first_token_ms"] == 100.0
    assert reply["metrics"]["speculative_decoding"]["num_draft_tokens"] == 13
    assert "per_step_accepted" not in reply["metrics"]["speculative_decoding"]
    found = events(
        served,
        "/v1/completions",
        {"prompt": "a", "stream_options": {"include_usage": True}, "return_metrics": True},
    )
    assert "metrics" in found[-1]


# ---- unknown fields


def test_unknown_fields_are_told_once_in_a_header(served: Served) -> None:
    reply = served.complete(temprature=0, topk=1, user="me")
    assert reply.status_code == 200
    assert reply.headers["x-ignored-fields"] == "temprature, topk"
    assert served.complete(temprature=0, stream=True).headers["x-ignored-fields"] == "temprature"
    assert served.complete(temprature=0, top_p=9).headers.get("x-ignored-fields") == "temprature"
    for quiet in (served.complete(), served.complete(user="me", store=True, prediction={})):
        assert "x-ignored-fields" not in quiet.headers


@pytest.mark.parametrize(
    "name",
    ["x" * 50_000, "👍" * 5000, "a\r\nSet-Cookie: b", "", "\x00", "é"],
    ids=lambda name: repr(name[:9]),
)
def test_unknown_names_cannot_break_the_header(served: Served, name: str) -> None:
    reply = served.complete(**{name: 0})
    assert reply.status_code == 200
    assert set(reply.headers) == {"content-length", "content-type", "x-ignored-fields"} | (
        set(reply.headers) & {"date", "server"}
    )
    assert len(reply.headers["x-ignored-fields"]) <= 60
    many = served.complete(**{f"field{i}": 0 for i in range(1000)})
    assert len(many.headers["x-ignored-fields"]) < 2000


def test_strict_servers_refuse_unknown_fields(serve: Serve) -> None:
    served = serve(strict=True)
    check_error(served.complete(temprature=0), 400, "temprature", "unknown_parameter")
    check_error(served.complete(**{"x" * 50_000: 0}), 400, "x" * 97 + "...")
    assert served.complete(user="me").status_code == 200


# ---- fingerprint, stream interval


def test_the_fingerprint_follows_what_decides_a_text() -> None:
    def fingerprint(**changes: str) -> str:
        settings = Settings(model="m")
        context = ServerContext(settings, Metrics("", "m", 0))
        context.engine = FakeEngine(None)  # type: ignore[assignment]
        context.engine.state = "running"
        context.engine.info |= changes  # type: ignore[operator]
        return context.fingerprint

    base = fingerprint()
    assert fingerprint() == base
    assert fingerprint(threads="64") == base
    changed = [
        fingerprint(**{name: "other"})
        for name in ("model", "dtype", "executor", "device", "architecture", "kernels")
    ]
    assert len({base, *changed}) == 7


def test_the_fingerprint_follows_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def fingerprint() -> str:
        context = ServerContext(Settings(model="m"), Metrics("", "m", 0))
        context.engine = FakeEngine(None)  # type: ignore[assignment]
        context.engine.state = "running"
        return context.fingerprint

    before = fingerprint()
    monkeypatch.setattr("server.context.versions", lambda: {"dspark-server": "99"})
    assert fingerprint() != before


@pytest.mark.parametrize("interval", [1, 3, 10, 1000])
def test_stream_interval(serve: Serve, interval: int) -> None:
    served = serve(stream_interval=interval)
    served.engine.tokens_per_step = 1
    found = events(served, "/v1/completions", {"prompt": "a", "max_tokens": 400, "n": 2, "logprobs": 0})
    for index in (0, 1):
        text = TEXT.format(choice=index, seed=None)
        assert text_of(found, index) == text
        sizes = [
            len(choice["logprobs"]["tokens"])
            for event in found
            for choice in event["choices"]
            if choice["index"] == index and choice["logprobs"]
        ]
        assert sum(sizes) == len(text.encode())
        assert sizes[0] == 1
        assert all(size == interval for size in sizes[1:-1])
    chat = events(served, "/v1/chat/completions", LONG_CHAT)
    assert text_of(chat) == ANSWER


# ---- who may, and from where


def test_keys_from_a_file(serve: Serve, tmp_path: Any) -> None:
    file = tmp_path / "keys"
    file.write_text("# for the team\n\nfirst\n  second  \n")
    served = serve(api_key=["given"], api_key_file=str(file))
    for key, status in (("given", 200), ("first", 200), ("second", 200), ("# for the team", 401)):
        assert served.complete_with({"Authorization": f"Bearer {key}"}).status_code == status
    for path in ("/tokenize", "/detokenize", "/v1/responses"):
        check_error(served.post(path, {}), 401, None, "invalid_api_key")


def test_cors(serve: Serve) -> None:
    served = serve(allowed_origins=["https://app.example"], api_key=["k"])
    asked = {
        "Origin": "https://app.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    reply = served.client.options("/v1/chat/completions", headers=asked)
    assert reply.status_code == 200
    assert reply.headers["access-control-allow-origin"] == "https://app.example"
    assert "authorization" in reply.headers["access-control-allow-headers"]
    other = served.client.options("/v1/chat/completions", headers=asked | {"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    refused = served.complete_with({"Origin": "https://app.example"})
    assert refused.status_code == 401, "asking first does not replace the key"
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
    assert "access-control-allow-origin" not in serve().complete_with({"Origin": "https://x"}).headers


def test_below_a_path(serve: Serve) -> None:
    """A proxy may have taken the path off or not; keys are asked for either way."""
    served = serve(root_path="/llm/a", api_key=["k"])
    key = {"Authorization": "Bearer k"}
    for prefix in ("", "/llm/a", "/llm/a/llm/a"):
        assert served.client.post(f"{prefix}/v1/completions", json={"prompt": "a"}).status_code == 401
        reply = served.client.post(f"{prefix}/v1/completions", json={"prompt": "a"}, headers=key)
        assert reply.status_code == 200
        assert served.client.get(f"{prefix}/health").status_code == 200
        assert "/llm/a/openapi.json" in served.client.get(f"{prefix}/docs").text
    check_error(served.client.get("/llm/ab/health"), 404, None)
    assert served.metrics.value("http_requests_total", path="/v1/completions", status="200") == 3


def test_no_key_is_asked_for_what_does_not_exist_elsewhere(serve: Serve) -> None:
    served = serve(api_key=["k"])
    check_error(served.client.get("/nowhere"), 404, None, "not_found")


# ---- keep-alive while queued


def test_comments_while_a_request_waits_and_only_then(serve: Serve) -> None:
    served = serve(sse_keep_alive_interval=0.05)
    served.engine.prefill = 0.2
    body = served.complete(stream=True).content
    assert body.startswith(b": keep-alive\n\n")
    with served.openai.completions.create(
        model="fake-model", prompt="a", max_tokens=400, stream=True
    ) as stream:
        assert "".join(chunk.choices[0].text for chunk in stream) == ANSWER
    served.engine.prefill = 0.0
    assert b"keep-alive" not in served.complete(stream=True).content


def test_a_stream_of_scored_prompts_that_is_left_is_aborted(served: Served) -> None:
    served.engine.prefill = 30.0
    with pytest.raises(httpx.ReadTimeout):
        served.client.post("/v1/completions", json={"prompt": "a", "echo": True, "logprobs": 1}, timeout=0.2)
    wait_until(lambda: not served.engine.active)
