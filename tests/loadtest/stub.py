"""A small OpenAI-compatible server over real sockets, in a thread of its own, with known timing."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Stub:
    """Answers every request with `tokens` in chunks of `width`; `sent` keeps when what was written.

    `continuous` off makes it count tokens at the end only, as some servers do; `strict` makes it refuse
    `continuous_usage_stats`. `fail_every` answers each n-th request with 503.
    """

    prefill: float = 0.02
    gap: float = 0.01
    width: int = 1
    tokens: int = 16
    continuous: bool = True
    strict: bool = False
    fail_every: int = 0
    flushable: bool = True
    requests: list[dict[str, Any]] = field(default_factory=list)
    sent: list[list[float]] = field(default_factory=list)
    generated: int = 0
    hung_up: int = 0
    flushed: int = 0
    connections: int = 0
    url: str = ""

    def start(self) -> Stub:
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(5)
        return self

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def _serve(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)

        async def listen() -> None:
            server = await asyncio.start_server(self._client, "127.0.0.1", 0)
            self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            ready.set()

        self._loop.run_until_complete(listen())
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split()
                length = 0
                while (header := await reader.readline()) != b"\r\n":
                    if header.lower().startswith(b"content-length:"):
                        length = int(header.split(b":")[1])
                body = await reader.readexactly(length)
                if method == "GET":
                    self._get(path, writer)
                elif path == "/flush_cache":
                    self.flushed += 1
                    _reply(writer, 200 if self.flushable else 404, "{}")
                elif path.startswith("/v1/"):
                    await self._post(json.loads(body), writer)
                else:
                    _reply(writer, 404, "{}")
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            self.hung_up += 1
        finally:
            writer.close()

    def _get(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            _reply(writer, 200, json.dumps({"data": [{"id": "stub"}]}))
        elif path == "/metrics":
            name = "stub:generation_tokens"
            _reply(writer, 200, f"# TYPE {name} counter\n{name}_total {self.generated}\n")
        else:
            _reply(writer, 404, "{}")

    async def _post(self, asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if self.strict and "continuous_usage_stats" in asked["stream_options"]:
            _reply(writer, 400, json.dumps({"error": {"message": "unknown field continuous_usage_stats"}}))
            return
        self.requests.append(asked)
        if self.fail_every and len(self.requests) % self.fail_every == 0:
            _reply(writer, 503, json.dumps({"error": {"type": "overloaded_error", "message": "full"}}))
            return
        written: list[float] = []
        self.sent.append(written)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n")
        writer.write(b"Transfer-Encoding: chunked\r\n\r\n")
        continuous = self.continuous and "continuous_usage_stats" in asked["stream_options"]
        total = min(self.tokens, asked["max_tokens"])
        due = time.perf_counter() + self.prefill
        usage: dict[str, int] = {}
        for start in range(0, total, self.width):
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            due += self.gap
            count = min(start + self.width, total)
            self.generated += count - start
            usage = {"prompt_tokens": 5, "completion_tokens": count, "total_tokens": 5 + count}
            finish = "length" if count == total else None
            choice = {"index": 0, "delta": {"content": "x"}, "finish_reason": finish}
            event: dict[str, Any] = {"choices": [choice]} | ({"usage": usage} if continuous else {})
            written.append(time.perf_counter())
            _chunk(writer, f"data: {json.dumps(event)}\n\n")
            await writer.drain()
        _chunk(writer, f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")


def _reply(writer: asyncio.StreamWriter, status: int, body: str) -> None:
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write((head + body).encode())


def _chunk(writer: asyncio.StreamWriter, text: str) -> None:
    writer.write(f"{len(text):x}\r\n{text}\r\n".encode())
