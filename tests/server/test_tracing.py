"""Traces: the client's is continued, spans follow one another, and a collector gets them over HTTP."""

from __future__ import annotations

import gzip
import http.server
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.outputs import StepStats
from server.startup import StartError
from server.tracing import exporter
from tests.server.conftest import Served, wait_until

sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def spans() -> Any:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    return InMemorySpanExporter()


@pytest.fixture
def traced(serve: Callable[..., Served], spans: Any) -> Served:
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return serve(tracer=provider.get_tracer("test"))


def finished(spans: Any, count: int) -> dict[str, Any]:
    wait_until(lambda: len(spans.get_finished_spans()) >= count)
    return {span.name: span for span in spans.get_finished_spans()}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_continues_the_clients_trace(traced: Served, spans: Any, stream: bool) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    body = {"prompt": "secret words", "stream": stream}
    assert traced.post("/v1/completions", body, headers=headers).status_code == 200
    found = finished(spans, 4)
    assert set(found) == {"POST /v1/completions", "queue", "prefill", "decode"}
    top = found["POST /v1/completions"]
    assert format(top.context.trace_id, "032x") == TRACE
    assert format(top.parent.span_id, "016x") == PARENT
    assert top.attributes["http.response.status_code"] == 200
    for name in ("queue", "prefill", "decode"):
        assert found[name].parent.span_id == top.context.span_id
    assert found["queue"].end_time == found["prefill"].start_time
    assert found["prefill"].end_time == found["decode"].start_time <= found["decode"].end_time
    assert found["decode"].attributes["dspark.accepted_tokens"] > 0
    assert "secret" not in "".join(span.to_json() for span in spans.get_finished_spans())


def test_rounds_are_the_steps_meanwhile(traced: Served, spans: Any) -> None:
    now = time.perf_counter()  # the fake's requests decode from 0.1 to 0.5 s after their arrival
    for begun in (now - 5, now + 0.2, now + 0.3, now + 60):
        step = StepStats(
            0.02, 0.01, 0.004, 8, 0, 1, 3, (3,), (2,), begun=begun, latch_time=0.001,
            worker_begun=begun + 0.001, verify_time=0.002, commit_begun=begun + 0.018,
        )  # fmt: skip
        traced.metrics.step(step)
    traced.complete()
    found = finished(spans, 12)
    names = [span.name for span in spans.get_finished_spans()]
    assert names.count("round") == names.count("select") == names.count("verify") == names.count("draft") == 2
    assert found["round"].parent.span_id == found["decode"].context.span_id
    assert found["draft"].parent.span_id == found["round"].context.span_id
    assert found["draft"].end_time - found["draft"].start_time == pytest.approx(4e6, abs=10)
    assert found["verify"].end_time == found["draft"].start_time
    assert found["round"].attributes["dspark.accepted"] == 2


def test_every_prompt_has_its_spans_and_refused_requests_none(traced: Served, spans: Any) -> None:
    traced.complete(prompt=["a", "b", "c"])
    found = finished(spans, 10)
    assert len(spans.get_finished_spans()) == 10
    assert found["POST /v1/completions"].parent is None
    assert traced.complete(temperature=-1).status_code == 400
    assert len(spans.get_finished_spans()) == 10


def test_what_is_not_sampled_costs_no_spans(serve: Callable[..., Served]) -> None:
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

    served = serve(tracer=sdk.TracerProvider(sampler=ALWAYS_OFF).get_tracer("test"))
    assert served.complete().status_code == 200


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    bodies: list[bytes] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            bodies.append(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_collector_gets_them(serve: Callable[..., Served], collector: tuple[str, list[bytes]]) -> None:
    url, bodies = collector
    provider = exporter(url)
    served = serve(tracer=provider.get_tracer("dspark"))
    assert served.chat().status_code == 200
    wait_until(lambda: served.metrics.value("http_requests_total", path="/v1/chat/completions", status="200"))
    provider.shutdown()
    text = b"".join(bodies)
    for word in (b"POST /v1/chat/completions", b"prefill", b"dspark-server"):
        assert word in text


def test_without_the_packages_the_server_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(StartError, match=r"pip install 'dspark-server\[otel\]'"):
        exporter("http://127.0.0.1:1")
