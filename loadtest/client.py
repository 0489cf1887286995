"""Sends one request to an OpenAI-compatible server and writes down when what came back."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

from loadtest.connection import ConnectionFailed, ConnectionPool, Exchange
from loadtest.record import Record
from loadtest.sse import EventParser

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True, slots=True)
class Target:
    """A server as the load needs to know it. `continuous`: it counts tokens with every chunk."""

    url: str
    model: str
    api_key: str | None = None
    continuous: bool = True
    timeout: float = 300.0


class StreamReader:
    """Reads the events of one reply into a record; `text` is the answer so far."""

    def __init__(self, record: Record, cancel_at: int | None = None) -> None:
        self.record = record
        self.text: list[str] = []
        self.exchange: Exchange | None = None
        self._parser = EventParser()
        self._cancel_at = cancel_at
        self._failure = b""

    def begin(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def read(self, piece: bytes, now: float) -> None:
        """A piece of the body. All that came in one read of the socket is one chunk, however many events."""
        assert self.exchange is not None
        if self.exchange.status != 200:
            self._failure += piece
            return
        count, spoken = -1, False
        for data in self._parser.feed(piece):
            if data == b"[DONE]":
                continue
            try:
                event = json.loads(data)
            except ValueError:
                self.record.error = "malformed event in the stream"
                continue
            if event.get("error"):
                self.record.error = f"error in the stream: {_kind(event['error'])}"
            usage, choices = event.get("usage"), event.get("choices")
            if usage:
                self._usage(usage)
            for choice in choices or ():
                spoken = self._choice(choice) or spoken
            if usage and choices:
                count = usage.get("completion_tokens", -1)
        record = self.record
        if spoken or count > (record.counts[-1] if record.counts else 0):
            if record.times and record.times[-1] == now:
                record.counts[-1] = max(record.counts[-1], count)
            else:
                record.times.append(now)
                record.counts.append(count)
            if spoken and record.first_text is None:
                record.first_text = now
            self._maybe_cancel()

    def finish(self) -> None:
        """Say how it ended, once the reply is complete."""
        assert self.exchange is not None
        record = self.record
        if self.exchange.abandoned:
            record.outcome = "cancelled"
            return
        if self.exchange.status != 200:
            record.error = f"HTTP {self.exchange.status}: {_body_kind(self._failure)}"
        elif record.error is None and record.finish_reason is None:
            record.error = "the stream ended without a finish reason"
        record.outcome = "ok" if record.error is None else "error"
        if record.ok and record.first_text is None:  # it ended at once: that was all the user waited for
            record.first_text = record.times[0] if record.times else time.perf_counter()

    def _usage(self, usage: dict[str, Any]) -> None:
        record = self.record
        record.completion_tokens = usage.get("completion_tokens")
        record.prompt_tokens = usage.get("prompt_tokens")
        details = usage.get("prompt_tokens_details") or {}
        record.cached_tokens = details.get("cached_tokens", record.cached_tokens)

    def _choice(self, choice: dict[str, Any]) -> bool:
        """Whether it brought text, or a piece of a tool call."""
        if choice.get("finish_reason"):
            self.record.finish_reason = choice["finish_reason"]
        delta = choice.get("delta")
        if delta is None:
            text, other = choice.get("text"), None
        else:
            text = delta.get("content")
            other = delta.get("reasoning_content") or delta.get("reasoning") or delta.get("tool_calls")
        if text:
            self.text.append(text)
        return bool(text or other)

    def _maybe_cancel(self) -> None:
        assert self.exchange is not None
        if self._cancel_at is not None and self.record.tokens >= self._cancel_at:
            self._cancel_at = None
            if self.record.finish_reason is None:
                self.exchange.hang_up()


class Client:
    """Sends requests over a pool of connections to one target."""

    def __init__(self, target: Target) -> None:
        self.target = target
        headers = {"Accept": "text/event-stream", "User-Agent": "dspark-loadtest"}
        if target.api_key:
            headers["Authorization"] = f"Bearer {target.api_key}"
        # Addresses are given with or without the /v1 that clients' base URLs end in.
        self._pool = ConnectionPool(target.url.rstrip("/").removesuffix("/v1"), headers)

    async def send(
        self, endpoint: str, body: dict[str, Any], record: Record, cancel_at: int | None = None
    ) -> str:
        """POST `body` as a stream to `endpoint` ("chat" or "completions"); returns the text that came.

        Fills in `record` and never raises for what the server does. `cancel_at`: hang up once so many
        tokens have come. A cancelled caller leaves the record as unfinished.
        """
        reader = StreamReader(record, cancel_at)
        options: dict[str, Any] = {"include_usage": True}
        if self.target.continuous:
            options["continuous_usage_stats"] = True
        whole = {"model": self.target.model, "stream": True, "stream_options": options} | body
        payload = json.dumps(whole, separators=(",", ":")).encode()
        record.started = time.perf_counter()
        try:
            async with asyncio.timeout(self.target.timeout):
                await self._pool.exchange(PATHS[endpoint], payload, reader.read, reader.begin)
            reader.finish()
        except ConnectionFailed as error:
            record.outcome, record.error = "error", record.error or str(error)
        except TimeoutError:
            record.outcome, record.error = "error", f"no complete reply in {self.target.timeout:g} s"
        except asyncio.CancelledError:
            record.outcome = "unfinished"
            raise
        finally:
            record.ended = time.perf_counter()
            if reader.exchange is not None:
                record.sent = reader.exchange.sent
        return "".join(reader.text)

    def close(self) -> None:
        self._pool.close()


def _kind(error: Any) -> str:
    """An error object in a few words that many errors of its kind share."""
    if not isinstance(error, dict):
        return str(error)[:80]
    return str(error.get("code") or error.get("type") or error.get("message") or "unnamed")[:80]


def _body_kind(body: bytes) -> str:
    try:
        answer = json.loads(body)
    except ValueError:
        return body[:80].decode("utf-8", "replace").strip() or "no body"
    return _kind(answer.get("error", answer)) if isinstance(answer, dict) else str(answer)[:80]
