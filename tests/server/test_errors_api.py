"""Whatever is sent, the reply is in OpenAI's shape, has the right status, is small, and hurts nobody else."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import string
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server import http_protocol
from server.protocol import ChatRequest, CompletionRequest
from server.unsupported import NEUTRAL, NO_EFFECT
from tests.server.conftest import Served, wait_until

JSON = {"Content-Type": "application/json"}
USER = [{"role": "user", "content": "hi"}]


def check_error(
    reply: httpx.Response, status: int, param: str | None, code: str | None = None
) -> dict[str, Any]:
    """The reply's error, after checking it against what is expected."""
    assert reply.status_code == status, reply.text
    assert len(reply.content) < 10_000
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == param, error
    if code is not None:
        assert error["code"] == code
    return error


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"nonsense", b"[]", b"1", b"null", b'"text"', b'{"a": NaN}', b'{"top_p": Infinity}',
        b'{"prompt": "\xff\xfe"}', b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"a":' * 100_000,
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", b"\xef\xbb\xbf{}", b'{"prompt": "a"} x', b"\x00",
    ],
    ids=lambda body: body[:12].decode(errors="replace"),
)  # fmt: skip
def test_malformed_json(served: Served, path: str, body: bytes) -> None:
    reply = served.client.post(path, content=body, headers=JSON)
    check_error(reply, 400, None, "invalid_json")


@pytest.mark.parametrize(
    "headers", [{}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}]
)
def test_wrong_content_type(served: Served, headers: dict[str, str]) -> None:
    reply = served.client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    check_error(reply, 415, "Content-Type")


def test_charset_in_content_type_is_fine(served: Served) -> None:
    headers = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert (
        served.client.post("/v1/completions", content=b'{"prompt": "a"}', headers=headers).status_code == 200
    )


def test_compressed_body(served: Served) -> None:
    reply = served.client.post("/v1/completions", content=b"x", headers=JSON | {"Content-Encoding": "gzip"})
    check_error(reply, 415, "Content-Encoding")


BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, ""),  # one BOS: fine
    ({"prompt": 5}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [258]}, "prompt"),
    ({"prompt": [10**400]}, "prompt"),
    ({"prompt": {"a": "b"}}, "prompt"),
    ({"prompt": ["a"] * 300}, "prompt"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": 1e999}, "temperature"),
    ({"temperature": 10**400}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 5}, "top_p"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 10**30}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"min_tokens": 50, "max_tokens": 5}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"seed": 2**63}, "seed"),
    ({"seed": "a"}, "seed"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [999]}, "stop_token_ids"),
    ({"stop_token_ids": ["a"] * 10_000}, "stop_token_ids[0]"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"999": 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"1": "1"}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
    ({"stream": "false"}, "stream"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream_options": {"unheard_of": 1}}, "stream_options.unheard_of"),
    ({"cache_salt": "x" * 2000}, "cache_salt"),
    ({"model": 5}, "model"),
    ({"echo": 1}, "echo"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"prompt_logprobs": -1}, "prompt_logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"echo": True, "logprobs": 21}, "logprobs"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [258]}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1] * 10_000}, "allowed_token_ids"),
    ({"allowed_token_ids": ["1"] * 10_000}, "allowed_token_ids[0]"),
    ({"bad_words": "hi"}, "bad_words"),
    ({"bad_words": [""]}, "bad_words[0]"),
    ({"bad_words": ["a"] * 257}, "bad_words"),
    ({"bad_words": ["x" * 257]}, "bad_words[0]"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"include_stop_str_in_output": "yes"}, "include_stop_str_in_output"),
    ({"skip_special_tokens": 0}, "skip_special_tokens"),
    ({"priority": 2**63}, "priority"),
    ({"request_id": ""}, "request_id"),
    ({"request_id": "a b"}, "request_id"),
    ({"request_id": "x" * 129}, "request_id"),
    ({"request_id": "a\n"}, "request_id"),
    ({"return_token_ids": 1}, "return_token_ids"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETIONS, ids=lambda value: str(value)[:40])
def test_bad_completions(served: Served, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        # The standard library writes Infinity where a number is too large, hence the text.
        body = json.dumps({"prompt": "a", "stream": stream} | fields).replace("Infinity", "1e999")
        reply = served.client.post("/v1/completions", content=body, headers=JSON)
        if param:
            check_error(reply, 400, param)
        else:
            assert reply.status_code == 200


BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": {}}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [{}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "king", "content": "hi"}]}, "messages[0].role"),
    ({"messages": [*USER, {"role": "assistant", "content": None}]}, "messages[1].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
     "messages[0].tool_calls[0].id"),
    ({"messages": [{"role": 5, "content": ["x" * 20] * 10}] * 5000}, "messages[0].role"),
    ({"messages": USER * 2}, "messages"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": "none"}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"chat_template": "{{ x }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"prompt": "a"}, "prompt"),
    ({"n": 128, "stream": True, "top_p": 0}, "top_p"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD_CHATS, ids=lambda value: str(value)[:40])
def test_bad_chats(served: Served, fields: dict[str, Any], param: str) -> None:
    check_error(served.chat(**fields), 400, param)
    assert served.chat().status_code == 200


def test_missing_fields(served: Served) -> None:
    check_error(served.post("/v1/completions", {}), 400, "prompt", "missing_required_parameter")
    check_error(served.post("/v1/chat/completions", {}), 400, "messages", "missing_required_parameter")


def test_template_error_is_told(served: Served) -> None:
    error = check_error(served.chat(messages=USER * 2), 400, "messages", "chat_template_error")
    assert "must alternate" in error["message"]


def test_unknown_model(served: Served) -> None:
    for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": USER})):
        check_error(served.post(path, body | {"model": "gpt-4"}), 404, "model", "model_not_found")
    with pytest.raises(openai.NotFoundError):
        served.openai.completions.create(model="gpt-4", prompt="a")


def test_too_long(served: Served) -> None:
    code = "context_length_exceeded"
    check_error(served.complete(prompt="x" * 600), 400, "prompt", code)
    check_error(served.chat(messages=[{"role": "user", "content": "x" * 600}]), 400, "messages", code)
    # So long that it is refused without being tokenised.
    check_error(served.complete(prompt="x" * 3_000_000), 400, "prompt", code)
    check_error(served.complete(prompt=[1] * 100_000), 400, "prompt", code)
    check_error(served.chat(messages=[{"role": "user", "content": "x" * 3_000_000}]), 400, "messages", code)


def test_too_many_choices(served: Served) -> None:
    check_error(served.complete(prompt=["a"] * 100, n=100), 400, "prompt")


def test_large_bodies(served: Served) -> None:
    check_error(served.complete(prompt="x" * 5_000_000), 413, None, "request_too_large")

    def chunks() -> Any:
        for _ in range(100):
            yield b" " * 100_000

    reply = served.client.post("/v1/completions", content=chunks(), headers=JSON)
    check_error(reply, 413, None, "request_too_large")
    assert served.complete().status_code == 200


def test_who_sends_a_large_body_to_its_end_still_hears_why_it_was_refused(served: Served) -> None:
    """As proxies do: a connection closed on what nobody has read would be reset, and the reply lost."""
    place = served.listener.getsockname()
    length = f"Content-Length: {5 << 20}"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{length}\r\n"
    for _ in range(10):
        with socket.create_connection(place, 10) as connection:
            connection.sendall(head.encode() + b"\r\n")
            for _ in range(80):
                connection.sendall(b" " * (1 << 16))
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
    with socket.create_connection(place, 10) as connection:  # asks before it sends
        connection.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413 ")


def test_unknown_paths_and_methods(served: Served) -> None:
    check_error(served.client.get("/nowhere"), 404, None)
    check_error(served.client.get("/v1/models/"), 404, "model")
    check_error(served.client.post("/v1/embeddings", json={}), 404, None)
    check_error(served.client.get("/v1/completions"), 405, None)
    check_error(served.client.delete("/v1/chat/completions"), 405, None)
    check_error(served.client.get("/" + "x" * 20_000), 404, None)


def test_queue_full(served: Served) -> None:
    served.engine.queue_limit = 2
    reply = served.complete(prompt=["a", "b", "c"])
    check_error(reply, 503, None, "server_overloaded")
    assert reply.headers["retry-after"] == "3"
    wait_until(lambda: not served.engine.active)  # the two that were taken before the third was refused
    assert served.complete(prompt=["a", "b"], stream=True).status_code == 200
    with pytest.raises(openai.InternalServerError):
        served.openai.completions.create(model="fake-model", prompt=["a", "b", "c"])


def test_api_keys(serve: Callable[..., Served]) -> None:
    served = serve(api_key=["first", "second"])
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"}):
        reply = served.complete_with(headers)
        check_error(reply, 401, None, "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"
    assert served.complete_with({"Authorization": "Bearer second"}).status_code == 200
    assert served.client.get("/v1/models").status_code == 401
    for path in ("/health", "/ready", "/metrics", "/version"):
        assert served.client.get(path).status_code == 200


def test_garbage_instead_of_http(served: Served) -> None:
    garbled = b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n"
    head, _, body = exchange(served, garbled).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_http"
    for garbage in (
        b"\x16\x03\x01\x02\x00",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    ):
        with socket.create_connection(served.listener.getsockname()) as connection:
            connection.settimeout(2)
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1000)
    assert served.complete().status_code == 200


def exchange(served: Served, sent: bytes) -> bytes:
    """All that comes back over a connection of its own."""
    with socket.create_connection(served.listener.getsockname()) as connection:
        connection.settimeout(5)
        with contextlib.suppress(OSError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        received = b""
        with contextlib.suppress(OSError):
            while chunk := connection.recv(65536):
                received += chunk
        return received


@pytest.mark.parametrize(
    "head",
    [
        b"X-Large: " + b"x" * 70_000 + b"\r\n\r\n",
        b"X-Endless: " + b"x" * 400_000,
        b"".join(b"X-%d: %d\r\n" % (i, i) for i in range(8000)) + b"\r\n",
        b"x" * 3_000_000,
    ],
    ids=["whole", "endless", "many", "no header"],
)
def test_heads_are_bounded(served: Served, head: bytes) -> None:
    received = exchange(served, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + head)
    if received:  # the rest of a large head may meet a closed connection, and take the reply with it
        start, _, body = received.partition(b"\r\n\r\n")
        assert start.startswith(b"HTTP/1.1 431 "), start
        assert json.loads(body)["error"]["code"] == "request_header_too_large"
    assert served.complete().status_code == 200


def closed(connection: socket.socket) -> bytes:
    """What comes until the other side closes; TimeoutError if it does not."""
    received = b""
    with contextlib.suppress(ConnectionError):
        while chunk := connection.recv(65536):
            received += chunk
    return received


def test_trailers_are_bounded(served: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection(served.listener.getsockname(), timeout=5) as connection:
        connection.sendall(head + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX-Endless: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(30):
                connection.sendall(b"x" * 10_000)
                time.sleep(0.005)
        received = closed(connection)
    assert not received or received.startswith(b"HTTP/1.1 431 ")
    assert served.complete().status_code == 200


@pytest.mark.parametrize("late", [b"x", b"\r\n"])
def test_bytes_behind_a_reply_do_not_keep_a_connection_for_ever(
    served: Served, late: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.1)
    length = b"Content-Length: 100\r\n" if late == b"x" else b"Content-Length: 0\r\n"
    with socket.create_connection(served.listener.getsockname(), timeout=5) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: text/plain\r\n" + length + b"\r\n"
        )
        assert connection.recv(65536).startswith(b"HTTP/1.1 415 ")
        connection.sendall(late)
        closed(connection)


def test_many_small_chunks_are_no_large_head(served: Served) -> None:
    content = json.dumps({"prompt": "a" * 20_000, "max_tokens": 1}).encode()
    parts = (content[at : at + 1] for at in range(len(content)))
    assert served.client.post("/v1/completions", content=parts, headers=JSON).status_code == 400  # too long
    parts = (b'{"prompt": "a"', b" " * 100_000, b"}")
    assert served.client.post("/v1/completions", content=iter(parts), headers=JSON).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_who_does_not_finish_a_head_is_not_waited_for(
    served: Served, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_SECONDS", 0.1)
    with socket.create_connection(served.listener.getsockname(), timeout=5) as connection:
        connection.sendall(sent)
        assert connection.recv(1000) == b""
    assert served.complete().status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/chat/completions", {"messages": [USER[0] | {"tool_calls": [1] * 400_000}]},
         "messages[0].tool_calls[0]"),
        ("/v1/chat/completions", {"messages": USER, "tools": [1] * 400_000}, "tools[0]"),
        ("/v1/completions", {"prompt": "a", "stream_options": dict.fromkeys(map(str, range(100_000)), 1)},
         "stream_options"),
        ("/v1/responses", {"input": "a", "include": ["x"] * 400_000}, "include[0]"),
    ],
)  # fmt: skip
def test_a_million_mistakes_are_one(served: Served, path: str, fields: dict[str, Any], param: str) -> None:
    check_error(served.post(path, fields), 400, param)


def test_a_token_that_is_named_often_is_named_once(served: Served) -> None:
    reply = served.complete(allowed_token_ids=[65, 66] * 200_000, stop_token_ids=[67] * 100_000)
    assert reply.status_code == 200
    params = served.engine.streams[-1].request.params
    assert (params.allowed_token_ids, params.stop_token_ids) == ((65, 66), (67,))


def test_large_headers_below_the_bound_are_fine(served: Served) -> None:
    assert served.complete_with({"X-Large": "x" * 30_000}).status_code == 200


def test_request_ids(serve: Callable[..., Served]) -> None:
    served = serve(enable_request_id_headers=True)
    assert served.complete_with({"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    assert len(served.complete_with({"X-Request-Id": "not ok"}).headers["x-request-id"]) == 32


FIELDS = sorted({*CompletionRequest.model_fields, *ChatRequest.model_fields, *NEUTRAL, *NO_EFFECT})
WORDS = [
    "type",
    "text",
    "role",
    "content",
    "user",
    "assistant",
    "include_usage",
    "name",
    "tool_calls",
    "1",
    "a",
]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 30)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(WORDS)
    | st.text(max_size=20).filter(lambda text: text.isprintable())
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12,
)


@settings(
    max_examples=250,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    database=None,
)
@given(
    fields=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), VALUES, max_size=4),
    path=st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
    valid_base=st.booleans(),
)
def test_any_json(served: Served, fields: dict[str, Any], path: str, valid_base: bool) -> None:
    base: dict[str, Any] = {"prompt": "a"} if path == "/v1/completions" else {"messages": USER}
    body = (base if valid_base else {}) | fields
    reply = served.client.post(path, content=json.dumps(body), headers=JSON)
    if reply.status_code != 200:
        assert 400 <= reply.status_code < 500, (body, reply.text)
        check_error(reply, reply.status_code, reply.json()["error"]["param"])
    else:
        assert reply.content.endswith(b"data: [DONE]\n\n") if body.get("stream") else reply.json()["choices"]


def test_random_bytes(served: Served) -> None:
    generator = random.Random(5)
    good = json.dumps({"prompt": "a", "temperature": 0.5, "stop": ["x"]})
    for _ in range(100):
        text = list(good)
        for _ in range(generator.randint(1, 5)):
            text[generator.randrange(len(text))] = generator.choice(string.printable)
        reply = served.client.post("/v1/completions", content="".join(text).encode(), headers=JSON)
        if reply.status_code != 200:
            assert 400 <= reply.status_code < 500
            check_error(reply, reply.status_code, reply.json()["error"]["param"])
    assert served.complete().status_code == 200
