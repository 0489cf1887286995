"""One HTTP request's work in the engine: a stream per prompt, all their choices counted through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from engine.async_engine import AsyncEngine, Draining, QueueFull, RequestStream
from engine.emission import FAULTS
from engine.outputs import OutputDelta, RequestStats, Usage
from engine.params import ParamError, SamplingParams
from engine.request import Request
from server.context import ServerContext
from server.errors import ApiError, internal, invalid, shutting_down, timed_out, translate
from server.protocol import GenerationRequest
from server.tracing import note

Batch = list[tuple[int, OutputDelta]]
Piece = TypeVar("Piece")

#: seconds in which an engine that is well answers an abort
_GRACE = 1.0


class Generation:
    """Deltas of all prompts as they come. Choice `i` of prompt `p` has index `p * n + i`."""

    def __init__(self, streams: Sequence[RequestStream], n: int, timeout: float) -> None:
        self._streams = streams
        self._n = n
        self._expired = False
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(timeout, self._expire) if timeout else None
        self._deadline = loop.time() + timeout + _GRACE if timeout else None
        self.choices = len(streams) * n

    def abort(self) -> None:
        """Give back what the engine holds for this; harmless when all is done."""
        if self._timer is not None:
            self._timer.cancel()
        for stream in self._streams:
            stream.abort()

    def _expire(self) -> None:
        self._expired = True
        self.abort()

    def usage(self) -> Usage:
        """Token counts so far, over all prompts."""
        if len(self._streams) == 1:
            return self._streams[0].usage
        total = Usage()
        for stream in self._streams:
            total.prompt_tokens += stream.usage.prompt_tokens
            total.cached_tokens += stream.usage.cached_tokens
            total.completion_tokens += stream.usage.completion_tokens
            total.draft_tokens += stream.usage.draft_tokens
            total.accepted_tokens += stream.usage.accepted_tokens
        return total

    def stats(self) -> list[RequestStats]:
        """Figures so far, an entry a prompt."""
        return [stream.stats for stream in self._streams]

    async def batches(self) -> AsyncIterator[Batch]:
        """Whatever has arrived, in order per choice, until each choice has finished; raises ApiError."""
        finished = 0
        source = self._single() if len(self._streams) == 1 else self._merged()
        try:
            async for batch in source:
                for _, delta in batch:
                    if delta.finish_reason == "error":
                        raise _failure(delta.error)
                    if delta.finish_reason == "abort":
                        raise timed_out() if self._expired else shutting_down()
                    finished += delta.finish_reason is not None
                yield batch
        finally:
            await source.aclose()
        if finished != self.choices:
            raise internal("The engine ended a stream early.")

    async def collected(self) -> list[list[OutputDelta]]:
        """All deltas of every choice, once all have finished."""
        pieces: list[list[OutputDelta]] = [[] for _ in range(self.choices)]
        async for batch in self.batches():
            for index, delta in batch:
                pieces[index].append(delta)
        return pieces

    async def _in_time(self, piece: Coroutine[Any, Any, Piece]) -> Piece:
        """Wait for it; but once the request's time is over, not for an engine that hangs."""
        try:
            async with asyncio.timeout_at(self._deadline):
                return await piece
        except TimeoutError:
            raise timed_out() from None

    async def _single(self) -> AsyncGenerator[Batch, None]:
        try:
            while pieces := await self._in_time(self._streams[0].batch()):
                yield [(delta.index, delta) for delta in pieces]
        except Exception as exc:
            raise translate(exc) from exc

    async def _merged(self) -> AsyncGenerator[Batch, None]:
        queue: asyncio.Queue[tuple[int, OutputDelta] | Exception | None] = asyncio.Queue()

        async def forward(offset: int, stream: RequestStream) -> None:
            try:
                async for delta in stream:
                    queue.put_nowait((offset + delta.index, delta))
                queue.put_nowait(None)
            except Exception as exc:
                queue.put_nowait(exc)

        tasks = [
            asyncio.create_task(forward(place * self._n, stream))
            for place, stream in enumerate(self._streams)
        ]
        open_streams = len(tasks)
        try:
            while open_streams:
                batch: Batch = []
                item = await self._in_time(queue.get())
                while True:
                    if isinstance(item, Exception):
                        raise translate(item) from item
                    if item is None:
                        open_streams -= 1
                    else:
                        batch.append(item)
                    if queue.empty():
                        break
                    item = queue.get_nowait()
                if batch:
                    yield batch
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _failure(error: str | None) -> ApiError:
    """Of a choice that ended in an error: the request's fault if it forbids every token, else ours."""
    if error == FAULTS["forbidden"]:
        return invalid(f"{error[:1].upper()}{error[1:]}.", code="no_token_left")
    return internal(error or "The request failed inside the engine.")


async def with_bad_words(
    context: ServerContext, wanted: GenerationRequest, params: SamplingParams
) -> SamplingParams:
    """`params` with the request's bad words in the model's tokens."""
    if not wanted.bad_words:
        return params
    spelt = await context.off_loop(context.encoder.bad_words, wanted.bad_words)
    return replace(params, bad_words=spelt)


def check(
    context: ServerContext,
    engine: AsyncEngine,
    params: SamplingParams,
    rename: dict[str, str],
    priority: int | None,
) -> None:
    """Refuse what the engine would not take, before the prompt costs anything: under overload that is most.

    ApiError speaks the names of `rename`.
    """
    try:
        params.check(engine.tokenizer.vocab_size, context.settings.max_logprobs)
        engine.check_room(params.n, priority or 0)
    except ParamError as exc:
        raise translate(exc, rename) from None
    except QueueFull as exc:
        context.metrics.rejected(exc.reason)
        raise translate(exc) from exc


def submit(
    context: ServerContext, engine: AsyncEngine, requests: Sequence[Request], rename: dict[str, str]
) -> Generation:
    """Hand all of `requests` to the engine, or none; ApiError speaks the endpoint's own parameter names."""
    streams: list[RequestStream] = []
    try:
        for request in requests:
            # The first speaks for all: they wait for each other too, which is no reason to refuse them.
            streams.append(engine.submit(request, patient=bool(streams)))
    except Exception as exc:
        for stream in streams:
            stream.abort()
        if isinstance(exc, QueueFull):
            context.metrics.rejected(exc.reason)
        elif isinstance(exc, Draining):
            context.metrics.rejected("draining")
        raise translate(exc, rename) from (None if isinstance(exc, ParamError) else exc)
    note(streams)
    return Generation(streams, requests[0].params.n, context.settings.request_timeout)
