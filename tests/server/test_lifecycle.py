"""Clients that leave, servers that stop, engines that die or hang: probes, aborts and drains."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.server.conftest import Served, wait_until
from tests.server.fake import FakeStream

LONG = {"prompt": "a", "max_tokens": 500, "ignore_eos": True}


def head(path: str, length: int) -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {length}",
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def send(served: Served, path: str, body: dict[str, Any]) -> socket.socket:
    """A request on a bare socket, whose reply nobody waits for."""
    connection = socket.create_connection(served.listener.getsockname())
    content = json.dumps(body).encode()
    connection.sendall(head(path, len(content)) + content)
    return connection


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("prefill", [0.0, 30.0])
def test_disconnect_aborts(served: Served, stream: bool, prompts: int, prefill: float) -> None:
    served.engine.step_time, served.engine.prefill = 0.02, prefill
    before = served.metrics.value("cancelled_requests_total")
    connection = send(served, "/v1/completions", LONG | {"prompt": ["a"] * prompts, "stream": stream})
    wait_until(lambda: len(served.engine.streams) == prompts)
    time.sleep(0.05)
    assert len(served.engine.active) == prompts
    left = time.monotonic()
    connection.close()
    wait_until(lambda: not served.engine.active, 0.5)
    assert all((one.aborted_at or 0) - left < 0.5 for one in served.engine.streams)
    wait_until(lambda: served.metrics.value("cancelled_requests_total") == (before or 0) + 1)
    assert served.metrics.value("http_requests_total", path="/v1/completions", status="499")


def test_leaving_while_sending_the_body(served: Served) -> None:
    connection = socket.create_connection(served.listener.getsockname())
    connection.sendall(head("/v1/completions", 99) + b"{")
    time.sleep(0.05)
    connection.close()
    assert served.complete().status_code == 200


def test_slow_reader_hurts_nobody(served: Served) -> None:
    served.engine.text = "x" * 450
    served.engine.tokens_per_step = 1
    body = {"messages": [{"role": "user", "content": "a"}], "n": 100, "logprobs": True, "top_logprobs": 20}
    lazy = [send(served, "/v1/chat/completions", body | {"stream": True}) for _ in range(2)]
    time.sleep(0.3)
    begin = time.monotonic()
    assert served.complete(max_tokens=5).status_code == 200
    assert time.monotonic() - begin < 5
    for connection in lazy:
        connection.close()
    wait_until(lambda: not served.engine.active)


def test_many_clients_at_once(served: Served) -> None:
    served.engine.step_time = 0.005

    def one(number: int) -> str:
        body = {"prompt": "a", "max_tokens": 400, "seed": number, "stream": number % 2 == 0}
        text = served.post("/v1/completions", body).text
        return text if number % 2 else text.split("[DONE]")[0]

    with ThreadPoolExecutor(50) as pool:
        texts = list(pool.map(one, range(200)))
    for number, text in enumerate(texts):
        if number % 2:
            assert f"seed {number}:" in json.loads(text)["choices"][0]["text"]
        else:
            events = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
            assert f"seed {number}:" in "".join(event["choices"][0]["text"] for event in events)


def test_drain(serve: Callable[..., Served]) -> None:
    served = serve()
    served.engine.step_time = 0.03
    replies: list[Any] = []
    threads = [
        threading.Thread(target=lambda stream=stream: replies.append(served.complete(stream=stream)))
        for stream in (True, False)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(served.engine.active) == 2)
    served.context.draining = True
    assert served.client.get("/ready").status_code == 503
    assert served.client.get("/health").status_code == 200
    refused = served.complete()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "server_shutting_down"
    assert "retry-after" in refused.headers
    served.call(served.engine.drain(10))
    for thread in threads:
        thread.join()
    assert [reply.status_code for reply in replies] == [200, 200]
    whole = next(reply for reply in replies if reply.headers["content-type"] == "application/json")
    assert whole.json()["choices"][0]["finish_reason"] == "stop"
    streamed = next(reply for reply in replies if reply is not whole)
    assert '"finish_reason":"stop"' in streamed.text
    assert served.metrics.value("admission_rejections_total", reason="draining") == 1


def test_drain_out_of_patience(serve: Callable[..., Served]) -> None:
    served = serve()
    served.engine.step_time = 0.05
    replies: list[Any] = []
    threads = [
        threading.Thread(
            target=lambda stream=stream: replies.append(served.complete(**LONG | {"stream": stream}))
        )
        for stream in (True, False)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(served.engine.active) == 2)
    time.sleep(0.1)
    served.call(served.engine.drain(0.0))
    for thread in threads:
        thread.join()
    assert sorted(reply.status_code for reply in replies) == [200, 503]
    streamed = next(reply for reply in replies if reply.status_code == 200)
    assert '"code":"server_shutting_down"' in streamed.text
    assert streamed.text.endswith("data: [DONE]\n\n")


def test_while_loading(serve: Callable[..., Served]) -> None:
    served = serve()
    served.context.engine = None
    assert served.client.get("/health").status_code == 200
    ready = served.client.get("/ready")
    assert (ready.status_code, ready.json()["reason"]) == (503, "starting")
    assert served.complete().json()["error"]["code"] == "model_loading"
    assert served.client.get("/v1/models").status_code == 503
    assert served.client.get("/version").json()["engine"] is None
    assert served.client.get("/metrics").status_code == 200


def test_dead_engine(serve: Callable[..., Served]) -> None:
    served = serve()
    served.engine.state = "dead"
    assert served.client.get("/health").status_code == 503
    assert served.client.get("/ready").status_code == 503
    reply = served.complete()
    assert (reply.status_code, reply.json()["error"]["code"]) == (500, "engine_dead")


def test_hanging_step(served: Served) -> None:
    assert served.client.get("/ready").status_code == 200
    assert served.client.head("/ready").status_code == 200
    served.engine.age = 61.0
    assert "61 s" in served.client.get("/ready").json()["reason"]
    assert served.client.get("/health").status_code == 200


def test_version_and_documentation(served: Served) -> None:
    version = served.client.get("/version").json()
    assert version["engine"]["executor"] == "fake"
    assert version["versions"]["dspark-server"] == version["version"]
    assert "swagger" in served.client.get("/docs").text
    schema = served.client.get("/openapi.json").json()
    assert "temperature" in schema["components"]["schemas"]["ChatRequest"]["properties"]
    assert "messages" in schema["components"]["schemas"]["ChatRequest"]["properties"]


def test_long_prompts_leave_the_loop_free(served: Served) -> None:
    encode = served.engine.tokenizer.encode

    def slow(text: str, add_special_tokens: bool = True) -> list[int]:
        time.sleep(0.5)
        return encode(text, add_special_tokens)

    served.engine.tokenizer.encode = slow  # type: ignore[method-assign]
    try:
        thread = threading.Thread(target=served.complete)
        thread.start()
        time.sleep(0.1)
        begin = time.monotonic()
        assert served.client.get("/health").status_code == 200
        assert time.monotonic() - begin < 0.2
        thread.join()
    finally:
        del served.engine.tokenizer.encode


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prefill", [0.0, 30.0])
def test_request_timeout(serve: Callable[..., Served], stream: bool, prefill: float) -> None:
    served = serve(request_timeout=0.3)
    assert served.complete().status_code == 200
    served.engine.prefill, served.engine.step_time = prefill, 0.05
    begin = time.monotonic()
    reply = served.complete(**LONG | {"stream": stream})
    assert 0.25 < time.monotonic() - begin < 2
    assert '"code":"request_timeout"' in reply.text
    assert reply.status_code == (200 if stream and not prefill else 504)
    wait_until(lambda: not served.engine.active)


@pytest.mark.parametrize("prompts", [1, 2])
def test_request_timeout_beside_an_engine_that_hangs(
    serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch, prompts: int
) -> None:
    served = serve(request_timeout=0.2)
    served.engine.prefill = 30.0
    begin = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(FakeStream, "abort", lambda stream: None)
        reply = served.complete(prompt=["a"] * prompts)
    assert 1 < time.monotonic() - begin < 4
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "request_timeout")
