"""Every status code that this server answers with, and what brings it about."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from engine.emission import FAULTS
from server import body
from tests.server.conftest import Served, wait_until
from tests.server.test_errors_api import JSON, exchange

Serve = Callable[..., Served]
POST = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")
GENERATING = POST[:3]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/v1/responses": {"input": "a"},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [65]},
}
GET = (
    "/v1/models",
    "/v1/models/fake-model",
    "/health",
    "/ready",
    "/metrics",
    "/version",
    "/docs",
    "/openapi.json",
)


def told(reply: httpx.Response) -> tuple[int, str, str | None]:
    """Status, type and code; and that the shape is OpenAI's."""
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(reply.content) < 10_000
    return reply.status_code, error["type"], error["code"]


INVALID = "invalid_request_error"
CASES: list[tuple[str, dict[str, Any], int, str, str]] = [
    # what, how it is sent, status, type, code
    ("malformed JSON", {"content": b"{", "headers": JSON}, 400, INVALID, "invalid_json"),
    ("no object", {"content": b"[]", "headers": JSON}, 400, INVALID, "invalid_json"),
    ("deep JSON", {"content": b'{"a":' * 5000, "headers": JSON}, 400, INVALID, "invalid_json"),
    ("no content type", {"content": b"{}"}, 415, INVALID, "unsupported_media_type"),
    ("wrong content type", {"content": b"{}", "headers": {"Content-Type": "text/xml"}}, 415, INVALID,
     "unsupported_media_type"),
    ("compressed", {"content": b"{}", "headers": JSON | {"Content-Encoding": "br"}}, 415, INVALID,
     "unsupported_media_type"),
    ("too large", {"content": b" " * 5_000_000, "headers": JSON}, 413, INVALID, "request_too_large"),
    ("unknown model", {"more": {"model": "gpt-9"}}, 404, INVALID, "model_not_found"),
    ("wrong type", {"more": {"model": 9}}, 400, INVALID, "invalid_type"),
]  # fmt: skip


@pytest.mark.parametrize("path", POST)
@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_what_is_wrong_with_a_body(served: Served, path: str, case: Any) -> None:
    _, sent, status, kind, code = case
    if "more" in sent:
        sent = {"json": GOOD[path] | sent["more"]}
    assert told(served.client.post(path, **sent)) == (status, kind, code)
    assert served.client.post(path, json=GOOD[path]).status_code == 200


@pytest.mark.parametrize("path", POST)
def test_missing_field(served: Served, path: str) -> None:
    status, kind, code = told(served.client.post(path, json={}))
    assert (status, kind) == (400, INVALID)
    assert code == ("invalid_value" if path == "/tokenize" else "missing_required_parameter")


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize(
    ("more", "code"),
    [({"temperature": -1}, "invalid_value"), ({"suffix": "x"}, "unsupported_parameter"),
     ({"seed": "1"}, "invalid_type"), ({"best_of": 3}, "unsupported_parameter")],
    ids=str,
)  # fmt: skip
def test_values_that_cannot_be_served(served: Served, path: str, more: dict[str, Any], code: str) -> None:
    assert told(served.client.post(path, json=GOOD[path] | more)) == (400, INVALID, code)


@pytest.mark.parametrize("path", GENERATING)
def test_a_prompt_beyond_the_context(served: Served, path: str) -> None:
    long = "x" * 600
    bodies = {
        "/v1/completions": {"prompt": long},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": long}]},
        "/v1/responses": {"input": long},
    }
    assert told(served.client.post(path, json=bodies[path])) == (400, INVALID, "context_length_exceeded")


@pytest.mark.parametrize("path", POST)
def test_200(served: Served, path: str) -> None:
    assert served.client.post(path, json=GOOD[path]).status_code == 200


@pytest.mark.parametrize("path", GET)
def test_200_of_what_is_read(served: Served, path: str) -> None:
    assert served.client.get(path).status_code == 200


@pytest.mark.parametrize("path", [*POST, "/v1/models"])
def test_401(serve: Serve, path: str) -> None:
    served = serve(api_key=["k"])
    reply = served.client.get(path) if path == "/v1/models" else served.client.post(path, json=GOOD[path])
    assert told(reply) == (401, "authentication_error", "invalid_api_key")
    assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/embeddings"),
        ("POST", "/v1/images/generations"),
        ("POST", "/v1/audio/speech"),
        ("POST", "/v1/moderations"),
        ("GET", "/v1/files"),
        ("GET", "/v1/responses/resp_1"),
        ("GET", "/v1"),
        ("POST", "/v1/completions/"),
        ("POST", "/score"),
    ],
)
def test_404(served: Served, method: str, path: str) -> None:
    assert told(served.client.request(method, path, json={})) == (404, INVALID, "not_found")


@pytest.mark.parametrize("path", [*POST, "/v1/models", "/health"])
def test_405(served: Served, path: str) -> None:
    assert told(served.client.delete(path)) == (405, INVALID, "method_not_allowed")


def test_431(served: Served) -> None:
    assert b" 431 " in exchange(served, b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000 + b"\r\n\r\n")[:20]


@pytest.mark.parametrize("path", GENERATING)
def test_499_in_log_and_metrics(served: Served, path: str) -> None:
    served.engine.prefill = 30.0
    before = served.metrics.value("http_requests_total", path=path, status="499") or 0
    with pytest.raises(httpx.ReadTimeout):
        served.client.post(path, json=GOOD[path], timeout=0.1)
    wait_until(lambda: served.metrics.value("http_requests_total", path=path, status="499") == before + 1)


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("stream", [False, True])
def test_500(served: Served, path: str, stream: bool) -> None:
    served.engine.fail_after = 0
    reply = served.client.post(path, json=GOOD[path] | {"stream": stream})
    assert told(reply) == (500, "server_error", "internal_error")


@pytest.mark.parametrize("path", GENERATING)
def test_400_where_the_request_forbids_every_token(served: Served, path: str) -> None:
    served.engine.fail_after, served.engine.failure = 0, FAULTS["forbidden"]
    assert told(served.client.post(path, json=GOOD[path])) == (400, INVALID, "no_token_left")


@pytest.mark.parametrize("path", POST)
def test_408_of_a_body_that_does_not_come(served: Served, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "_BODY_SECONDS", 0.1)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    with socket.create_connection(served.listener.getsockname(), timeout=5) as connection:
        connection.sendall(head.encode() + b"{")
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    head_back, _, content = received.partition(b"\r\n\r\n")
    assert head_back.startswith(b"HTTP/1.1 408 ")
    assert json.loads(content)["error"]["code"] == "request_timeout"


@pytest.mark.parametrize("path", GENERATING)
def test_503_of_a_full_queue(served: Served, path: str) -> None:
    served.engine.queue_limit = 0
    reply = served.client.post(path, json=GOOD[path])
    assert told(reply) == (503, "service_unavailable_error", "server_overloaded")
    assert int(reply.headers["retry-after"]) >= 1


@pytest.mark.parametrize("path", POST)
@pytest.mark.parametrize("state", ["loading", "draining", "dead"])
def test_503_and_500_around_the_engines_life(serve: Serve, path: str, state: str) -> None:
    served = serve()
    if state == "loading":
        served.context.engine = None
        expected = (503, "service_unavailable_error", "model_loading")
    elif state == "draining":
        served.context.draining = True
        expected = (503, "service_unavailable_error", "server_shutting_down")
    else:
        served.engine.state = "dead"
        expected = (500, "server_error", "engine_dead")
    if path in GENERATING or state == "loading":
        assert told(served.client.post(path, json=GOOD[path])) == expected
    served.context.engine = served.engine  # type: ignore[assignment]
