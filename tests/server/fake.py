"""An engine without a model: the surface of AsyncEngine, deterministic text, delays and faults on demand."""

from __future__ import annotations

import asyncio
import codecs
import itertools
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from engine.async_engine import Draining, EngineDead, QueueFull
from engine.chat_template import ChatTemplate, ChatTemplateError
from engine.outputs import EngineGauges, OutputDelta, RequestStats, Round, TokenLogprob, Usage
from engine.params import ParamError
from engine.request import Request

BOS, EOS = 256, 257
TEXT = "Grüße 👍 from choice {choice}, seed {seed}: the quick brown fox jumps over the lazy dog."


class FakeTokenizer:
    """One token a byte, so that characters are often cut."""

    vocab_size = 258
    token_bytes = [bytes([value]) for value in range(256)] + [b"<s>", b"</s>"]
    special_ids = frozenset({BOS, EOS})
    has_chat_template = True
    template = "{{ messages }}"  # what it is said to be; `apply_chat_template` does as it likes

    def chat_template(self, tools: bool = False) -> ChatTemplate:
        return ChatTemplate(self.template)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = list(text.encode())
        return [BOS, *ids] if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.token_bytes[token_id].decode(errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,
    ) -> list[int]:
        roles = [message["role"] for message in messages]
        if any(one == two == "user" for one, two in itertools.pairwise(roles)):
            raise ChatTemplateError("Conversation roles must alternate user/assistant/user/assistant/...")
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        text += "".join(f"[{name}={value}]" for name, value in variables.items())
        return self.encode(text + ("<assistant>" if add_generation_prompt else ""))


class FakeStream:
    """Plays the answer of one request."""

    def __init__(self, engine: FakeEngine, request: Request) -> None:
        self.request = request
        self.usage = Usage(prompt_tokens=len(request.prompt_token_ids), cached_tokens=16)
        self._engine = engine
        self._deltas: asyncio.Queue[OutputDelta] = asyncio.Queue()
        self._open = request.params.n
        self.aborted_at: float | None = None
        self._task = asyncio.create_task(self._play())
        self._task.add_done_callback(lambda _: engine.active.discard(self))

    @property
    def stats(self) -> RequestStats:
        return RequestStats(None, 0.0, 0.1, 0.5, self.usage, 0, (5, 5, 3), (4, 0, 3))

    def abort(self) -> None:
        if not self._task.done() and self.aborted_at is None:
            self.aborted_at = time.monotonic()
            self._task.cancel()

    async def __aenter__(self) -> FakeStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.abort()

    async def batch(self) -> list[OutputDelta]:
        """One piece at a time; empty after the last."""
        try:
            return [await self.__anext__()]
        except StopAsyncIteration:
            return []

    def __aiter__(self) -> AsyncIterator[OutputDelta]:
        return self

    async def __anext__(self) -> OutputDelta:
        if not self._open:
            raise StopAsyncIteration
        delta = await self._deltas.get()
        self._open -= delta.finish_reason is not None
        return delta

    async def _play(self) -> None:
        engine, begin, reason = self._engine, time.monotonic(), "abort"
        try:
            await asyncio.sleep(engine.prefill)
            engine.observer.first_token(time.monotonic() - begin)
            plays = [self._choice(index) for index in range(self.request.params.n)]
            while plays:
                for play in list(plays):
                    delta = next(play)
                    self._deltas.put_nowait(delta)
                    if delta.finish_reason is not None:
                        plays.remove(play)
                        reason = delta.finish_reason
                await asyncio.sleep(engine.step_time)
        except asyncio.CancelledError:
            for index in range(self._open):
                self._deltas.put_nowait(OutputDelta(index, "", (), (), "abort"))
        finally:
            took = time.monotonic() - begin
            engine.observer.finished(RequestStats(reason, 0.0, engine.prefill, took, self.usage, 0))  # type: ignore[arg-type]

    def _choice(self, index: int) -> Any:
        engine, params = self._engine, self.request.params
        text = engine.text.format(choice=index, seed=params.seed)
        if params.max_tokens == 0:
            yield OutputDelta(index, "", (), (), "length", prompt_logprobs=self._prompt_logprobs())
            return
        finish, stop_reason = "stop", None
        for stop in params.stop:
            if stop in text:
                text, stop_reason = text[: text.index(stop)], stop
        tokens = list(text.encode())
        if params.ignore_eos and params.max_tokens:
            tokens = (tokens * (params.max_tokens // len(tokens) + 1))[: params.max_tokens]
        limit = params.max_tokens or engine.max_model_len - len(self.request.prompt_token_ids)
        if len(tokens) >= limit:
            tokens, finish, stop_reason = tokens[:limit], "length", None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        width = engine.tokens_per_step
        for start in range(0, len(tokens), width):
            piece = tuple(tokens[start : start + width])
            last = start + width >= len(tokens)
            self.usage.completion_tokens += len(piece)
            self.usage.draft_tokens += width
            self.usage.accepted_tokens += len(piece) - 1
            if engine.fail_after is not None and start >= engine.fail_after:
                yield OutputDelta(index, "", (), (), "error", error=engine.failure)
                return
            yield OutputDelta(
                index,
                decoder.decode(bytes(piece), last),
                piece,
                tuple(self._logprob(token, start + i) for i, token in enumerate(piece))
                if params.logprobs is not None
                else (),
                finish if last else None,  # type: ignore[arg-type]
                stop_reason if last else None,
                prompt_logprobs=() if start else self._prompt_logprobs(),
                rounds=(Round(width, len(piece) - 1, len(piece)),),
            )

    def _logprob(self, token: int, place: int) -> TokenLogprob:
        top = [(token, -0.1 * place), *((i, -1.0 - i) for i in range(200, 300) if i < 256 and i != token)]
        return TokenLogprob(token, -0.1 * place, tuple(top[: self.request.params.logprobs]))

    def _prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Each token at rank 2, behind the one before it."""
        wanted, ids = self.request.params.prompt_logprobs, self.request.prompt_token_ids
        if wanted is None:
            return ()
        return tuple(
            TokenLogprob(own, -1.5, ((before, -0.5), (own, -1.5))[:wanted], 2)
            for before, own in itertools.pairwise(ids)
        )


class FakeEngine:
    """Settable at any time: whatever `reset` sets, and `state`."""

    def __init__(self, observer: Any, max_model_len: int = 512) -> None:
        self.tokenizer = FakeTokenizer()
        self.max_model_len = max_model_len
        self.observer = observer
        self.info = {
            "model": "fake", "dtype": "float32", "executor": "fake", "device": "cpu", "threads": 1,
            "drafter": "off", "verify_policy": "off", "pages": 256,
        }  # fmt: skip
        self.state = "starting"
        self.active: set[FakeStream] = set()
        self.streams: list[FakeStream] = []
        self.reset()

    def reset(self) -> None:
        """Back to the quick, faultless default."""
        self.text = TEXT
        self.tokenizer.template = FakeTokenizer.template
        self.step_time = self.prefill = self.age = 0.0
        self.tokens_per_step = 5
        self.fail_after: int | None = None
        self.failure = "the logits are not finite"
        self.queue_limit = 10_000
        self.streams.clear()

    def scheduler_state(self) -> dict[str, Any]:
        return {"policy": "off"}

    async def start(self) -> None:
        self.state = "running"

    async def drain(self, timeout: float) -> None:
        self.state = "draining"
        deadline = time.monotonic() + timeout
        while self.active and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        for stream in list(self.active):
            stream.abort()
        await asyncio.sleep(0.01)

    def check_room(self, n: int = 1, priority: int = 0) -> None:
        if len(self.active) + n > self.queue_limit:
            raise QueueFull("full", 2.5)

    def submit(self, request: Request, *, patient: bool = False) -> FakeStream:
        if self.state == "dead":
            raise EngineDead("dead")
        if self.state != "running":
            raise Draining("draining")
        request.params.check(self.tokenizer.vocab_size)
        wanted = 1 if request.params.max_tokens is None else request.params.max_tokens
        if len(request.prompt_token_ids) + wanted > self.max_model_len:
            raise ParamError("prompt", "the prompt is too long", code="context_length_exceeded")
        self.check_room(request.params.n)
        stream = FakeStream(self, request)
        self.active.add(stream)
        self.streams.append(stream)
        return stream

    def gauges(self) -> EngineGauges:
        return EngineGauges(running=len(self.active), kv_usage=0.25, pages_free=192, pages_total=256)

    def step_age(self) -> float:
        return self.age
