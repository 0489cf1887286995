"""The kinds of requests of a soak: good ones whose text is known, and clients of every bad sort."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from server.bench_prompts import PROMPTS

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "count": {"type": "integer"}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
#: Each with a text that is a function of the request: greedy, or seeded.
ASKED: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "max_tokens": 60},
    {"temperature": 1, "seed": 7, "max_tokens": 60},
    {"temperature": 0.8, "top_p": 0.9, "seed": 11, "max_tokens": 80, "stop": [".\n"]},
    {"temperature": 1, "seed": 3, "max_tokens": 40, "n": 3},
    {"temperature": 1, "seed": 5, "max_tokens": 50, "presence_penalty": 0.7, "frequency_penalty": 0.3},
    {"temperature": 0, "max_tokens": 30, "logprobs": True, "top_logprobs": 3},
    {
        "temperature": 1, "seed": 9, "max_tokens": 80,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    },
)  # fmt: skip
BROKEN: tuple[tuple[bytes, str], ...] = (
    (b"{", "application/json"),
    (b"\xff\xfe\x00", "application/json"),
    (b'{"messages": []}', "application/json"),
    (b'{"messages": [{"role": "user", "content": "a"}], "temperature": "hot"}', "application/json"),
    (b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": -4}', "application/json"),
    (b'{"messages": [{"role": "user", "content": "a"}], "n": 1e9}', "application/json"),
    (b"[" * 5000, "application/json"),
    (b"a=b", "application/x-www-form-urlencoded"),
    (b'{"model": "nobody", "messages": [{"role": "user", "content": "a"}]}', "application/json"),
)


def body(number: int) -> dict[str, Any]:
    """One of finitely many requests."""
    prompt = PROMPTS[number % len(PROMPTS)]
    return {"messages": [{"role": "user", "content": prompt}], **ASKED[number % len(ASKED)]}


@dataclass
class Traffic:
    """What was sent, what came of it, and whatever was wrong."""

    texts: dict[int, list[str]] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    delivered: int = 0  # tokens of replies that were read to their end
    wrong: list[str] = field(default_factory=list)
    http: httpx.AsyncClient = field(init=False)

    @asynccontextmanager
    async def client(self, url: str, users: int) -> AsyncIterator[None]:
        """Connections for so many users at once."""
        limits = httpx.Limits(max_connections=users, max_keepalive_connections=users)
        async with httpx.AsyncClient(base_url=url, timeout=300.0, limits=limits) as self.http:
            yield

    async def know(self, numbers: range) -> None:
        """Ask each alone and without drafts: that is what it must be under load and with them."""
        for number in numbers:
            reply = await self._post(body(number) | {"num_speculative_tokens": 0})
            self.texts[number] = [choice["message"]["content"] for choice in reply["choices"]]

    async def one(self, pick: random.Random) -> None:
        """Send something."""
        kinds: list[tuple[float, Callable[[random.Random], Awaitable[None]]]] = [
            (5, self.whole), (5, self.streamed), (1, self.slow_reader), (2, self.cancelled),
            (1, self.gone), (2, self.broken), (1, self.scored),
        ]  # fmt: skip
        (kind,) = pick.choices([each for _, each in kinds], [weight for weight, _ in kinds])
        self.kinds[kind.__name__] += 1
        try:
            await kind(pick)
        except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
            self.wrong.append(f"{kind.__name__}: {error!r}")

    async def whole(self, pick: random.Random) -> None:
        number = pick.choice(list(self.texts))
        reply = await self._post(body(number))
        self._compare(number, [choice["message"]["content"] for choice in reply["choices"]])

    async def streamed(self, pick: random.Random, pause: float = 0.0) -> None:
        number = pick.choice(list(self.texts))
        texts = [""] * len(self.texts[number])
        async for event in self._stream(body(number)):
            for choice in event["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
            if event.get("usage"):
                self.delivered += event["usage"]["completion_tokens"]
            await asyncio.sleep(pause)
        self._compare(number, texts)

    async def slow_reader(self, pick: random.Random) -> None:
        await self.streamed(pick, pause=0.2)

    async def cancelled(self, pick: random.Random) -> None:
        """Leaves after some chunks."""
        left = pick.randrange(1, 20)
        stream = self._stream(body(pick.choice(list(self.texts))) | {"max_tokens": 400, "stop": None})
        async for _ in stream:
            left -= 1
            if left == 0:
                break
        await stream.aclose()

    async def gone(self, pick: random.Random) -> None:
        """Leaves without waiting for a reply, at some moment."""
        content = json.dumps(body(pick.choice(list(self.texts))) | {"max_tokens": 400}).encode()
        host, port = self.http.base_url.host, self.http.base_url.port
        _, writer = await asyncio.open_connection(host, port)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        sent = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
        writer.write(sent[: len(sent) if pick.random() < 0.7 else pick.randrange(1, len(sent))])
        await writer.drain()
        await asyncio.sleep(pick.choice((0.0, 0.05, 0.5)))
        writer.close()
        await writer.wait_closed()

    async def broken(self, pick: random.Random) -> None:
        content, kind = pick.choice(BROKEN)
        reply = await self.http.post(CHAT, content=content, headers={"Content-Type": kind})
        self.statuses[reply.status_code] += 1
        if not 400 <= reply.status_code < 500 or not reply.json()["error"]["message"]:
            self.wrong.append(f"broken body {content[:40]!r}: {reply.status_code} {reply.text[:200]}")

    async def scored(self, pick: random.Random) -> None:
        """A prompt with its tokens' logprobs, and what can be told about it."""
        prompt = pick.choice(PROMPTS)
        asked = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
        reply = await self.http.post("/v1/completions", json=asked)
        self.statuses[reply.status_code] += 1
        answer = reply.raise_for_status().json()
        self.delivered += answer["usage"]["completion_tokens"]
        if not answer["choices"][0]["text"].startswith(prompt):
            self.wrong.append(f"echo of {prompt[:40]!r}")

    async def _post(self, asked: dict[str, Any]) -> dict[str, Any]:
        reply = await self.http.post(CHAT, json=asked)
        self.statuses[reply.status_code] += 1
        answer: dict[str, Any] = reply.raise_for_status().json()
        self.delivered += answer["usage"]["completion_tokens"]
        return answer

    async def _stream(self, asked: dict[str, Any]) -> Any:
        streamed = asked | {"stream": True, "stream_options": {"include_usage": True}}
        async with self.http.stream("POST", CHAT, json=streamed) as reply:
            self.statuses[reply.status_code] += 1
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        raise ValueError(line)
                    yield event

    def _compare(self, number: int, texts: list[str]) -> None:
        if texts != self.texts[number]:
            self.wrong.append(f"request {number}: {texts!r} instead of {self.texts[number]!r}")
