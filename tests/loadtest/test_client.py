"""Replies as they may come, fed with times of our choosing."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from loadtest.client import StreamReader
from loadtest.connection import Exchange
from loadtest.record import Record


def reader(status: int = 200, cancel_at: int | None = None) -> StreamReader:
    one = StreamReader(Record("x"), cancel_at)
    exchange = Exchange(one.read, asyncio.new_event_loop().create_future())
    exchange.status = status
    one.begin(exchange)
    return one


def event(
    text: str | None = None, tokens: int | None = None, finish: str | None = None, **delta: Any
) -> bytes:
    choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": finish}
    if text is not None:
        choice["delta"]["content"] = text
    whole: dict[str, Any] = {"choices": [choice]}
    if tokens is not None:
        details = {"cached_tokens": 2}
        whole["usage"] = {"prompt_tokens": 3, "completion_tokens": tokens, "prompt_tokens_details": details}
    return f"data: {json.dumps(whole)}\n\n".encode()


def test_an_opening_without_text_is_no_first_token() -> None:
    one = reader()
    one.read(event("", 0, role="assistant"), 1.0)
    assert one.record.first_text is None
    one.read(event("Hi", 1), 2.0)
    one.read(event(None, 2, "stop"), 2.5)  # the end-of-sequence token: counted, but no text
    one.read(b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n', 2.6)
    one.read(b"data: [DONE]\n\n", 2.6)
    one.finish()
    record = one.record
    assert (record.outcome, record.finish_reason, record.first_text) == ("ok", "stop", 2.0)
    assert (record.times, record.counts, record.tokens) == ([2.0, 2.5], [1, 2], 2)
    assert (record.prompt_tokens, record.cached_tokens) == (3, 2)


def test_events_of_one_read_are_one_chunk() -> None:
    one = reader()
    one.read(event("a", 1) + event("b", 2), 1.0)
    one.read(event("b", 3), 1.0)
    one.read(event("c", 4), 1.5)
    assert (one.record.times, one.record.counts) == ([1.0, 1.5], [3, 4])


def test_a_tool_call_is_output_and_so_is_the_end_of_an_empty_answer() -> None:
    one = reader()
    one.read(event(role="assistant"), 1.0)
    call = [{"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}]
    one.read(event(tool_calls=call), 2.0)
    one.read(event(finish="tool_calls"), 3.0)
    one.finish()
    assert (one.record.outcome, one.record.first_text, one.record.times) == ("ok", 2.0, [2.0])
    one = reader()
    one.read(event(finish="stop"), 1.0)
    before = time.perf_counter()
    one.finish()
    assert one.record.outcome == "ok"
    assert one.record.first_text is not None
    assert before <= one.record.first_text <= time.perf_counter()


def test_reasoning_counts_as_text() -> None:
    one = reader()
    one.read(event(None, 1, reasoning_content="hm"), 1.0)
    one.read(event("x", 2), 2.0)
    assert one.record.first_text == 1.0
    assert one.text == ["x"]


def test_completions_and_usage_at_the_end_only() -> None:
    one = reader()
    one.read(b'data: {"choices": [{"text": "ab", "finish_reason": null}]}\n\n', 1.0)
    one.read(b'data: {"choices": [{"text": "c", "finish_reason": "length"}]}\n\n', 2.0)
    one.read(b'data: {"choices": [], "usage": {"completion_tokens": 6, "prompt_tokens": 1}}\n\n', 2.0)
    one.finish()
    assert one.record.ok
    assert (one.record.counts, one.record.tokens) == ([-1, -1], 6)
    assert one.record.tpot == pytest.approx(1.0 / 3)


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        ([event("a", 1)], "without a finish reason"),
        (
            [event("a", 1), b'data: {"error": {"code": "nan", "message": "m"}}\n\n'],
            "error in the stream: nan",
        ),
        ([b"data: {no json\n\n", event("a", 1, "stop")], "malformed event"),
    ],
)
def test_failures_within_a_stream(pieces: list[bytes], error: str) -> None:
    one = reader()
    for piece in pieces:
        one.read(piece, 1.0)
    one.finish()
    assert one.record.outcome == "error"
    assert error in str(one.record.error)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b'{"error": {"type": "overloaded_error", "message": "x"}}', "HTTP 503: overloaded_error"),
        (b"plain words", "HTTP 503: plain words"),
        (b"", "HTTP 503: no body"),
        (b'{"detail": "gone"}', "HTTP 503: unnamed"),
    ],
)
def test_refusals_by_kind(body: bytes, kind: str) -> None:
    one = reader(503)
    one.read(body[:5], 1.0)
    one.read(body[5:], 1.0)
    one.finish()
    assert (one.record.outcome, one.record.error) == ("error", kind)


def test_it_hangs_up_after_so_many_tokens() -> None:
    one = reader(cancel_at=3)
    one.read(event("a", 2), 1.0)
    assert one.exchange is not None
    assert not one.exchange.abandoned
    one.read(event("b", 4), 2.0)
    assert one.exchange.abandoned
    one.finish()
    assert (one.record.outcome, one.record.tokens) == ("cancelled", 4)


def test_it_does_not_hang_up_on_what_is_complete() -> None:
    one = reader(cancel_at=3)
    one.read(event("a", 4, "stop"), 1.0)
    one.finish()
    assert one.record.ok
