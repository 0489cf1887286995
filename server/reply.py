"""A generation as an HTTP reply, whole or streamed; the endpoints differ only in the shape of choices."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from starlette.responses import Response

from engine.outputs import OutputDelta
from server.context import ServerContext
from server.disconnect import ClientGone, gone_response, unless_gone
from server.generation import Generation
from server.logprobs import LONG
from server.pacing import Pacer
from server.protocol import GenerationRequest
from server.request_metrics import wanted_metrics
from server.shapes import Shape, usage_json
from server.sse import EventStream, dumps, event
from server.token_origins import speculation_json


def new_id(shape: Shape, wanted: GenerationRequest) -> str:
    """A reply's id, the client's own if it has one; it need not be unique."""
    return shape.prefix + (wanted.request_id or uuid.uuid4().hex)


class Reply:
    """Writes one reply of `generation`, which belongs to it from now on."""

    def __init__(
        self,
        context: ServerContext,
        wanted: GenerationRequest,
        shape: Shape,
        generation: Generation,
        reply_id: str,
        model: str,
    ) -> None:
        self._context = context
        self._wanted = wanted
        self._shape = shape
        self._generation = generation
        self._tokenizer = context.loaded().tokenizer
        self._head = {
            "id": reply_id,
            "object": shape.chunk_object if wanted.stream else shape.whole_object,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": context.fingerprint,
        }

    async def response(self, http: Request) -> Response:
        """The reply in the form that the client asked for; raises ApiError if it failed."""
        if self._wanted.stream:
            keep_alive = self._context.settings.sse_keep_alive_interval
            return EventStream(self._events(), self._generation.abort, keep_alive)
        try:
            content = await unless_gone(http.receive, self._whole())
        except ClientGone:
            return gone_response(http.scope)
        finally:
            self._generation.abort()
        return Response(content, media_type="application/json")

    async def _whole(self) -> str:
        pieces = await self._generation.collected()
        told = sum(len(each.prompt_logprobs) + len(each.logprobs) for deltas in pieces for each in deltas)
        if told > LONG:
            text: str = await self._context.off_loop(self._body, pieces)
            return text
        return self._body(pieces)

    def _body(self, pieces: list[list[OutputDelta]]) -> str:
        choices = [self._shape.whole(index, deltas) for index, deltas in enumerate(pieces)]
        body = self._head | {"choices": choices, "usage": usage_json(self._generation.usage())}
        if (metrics := self._metrics()) is not None:
            body["metrics"] = metrics
        return dumps(body | self._shape.extra(pieces[0][0]))

    async def _events(self) -> AsyncIterator[bytes]:
        """Events, those that arrived together joined, since every write is a system call."""
        shape, wanted = self._shape, self._wanted
        pacer = Pacer(self._context.settings.stream_interval)
        opened: set[int] = set()
        before = f'{dumps(self._head)[:-1]},"choices":['
        async for batch in self._generation.batches():
            choices: list[dict[str, Any]] = []
            extra = ""
            for index, piece in batch:
                delta = pacer.add(index, piece)
                if delta is None:
                    continue
                if not opened and (beside := shape.extra(delta)):
                    extra = f",{dumps(beside)[1:-1]}"
                if index not in opened:
                    opened.add(index)
                    if len(delta.prompt_logprobs) > LONG:
                        opening = await self._context.off_loop(shape.opening, index, delta)
                    else:
                        opening = shape.opening(index, delta)
                    if opening is not None:
                        choices.append(opening)
                # Half a character is no news, unless more than its text was asked for.
                told = wanted.include_speculation and bool(delta.token_ids)
                ids = wanted.return_token_ids and bool(delta.token_ids)
                if delta.text or delta.logprobs or ids or told:
                    news = shape.piece(index, delta)
                    if told:
                        news["speculation"] = speculation_json(self._tokenizer, delta)
                    choices.append(news)
                if delta.finish_reason is not None:
                    choices.append(shape.closing(index, delta))
            if choices:
                after = self._after()
                first, *others = choices
                events = [event(f"{before}{dumps(first)}]{after}{extra}}}")]
                yield b"".join(events + [event(f"{before}{dumps(choice)}]{after}}}") for choice in others])
        if wanted.include_usage:
            metrics = self._metrics()
            more = "" if metrics is None else f',"metrics":{dumps(metrics)}'
            yield event(f'{before}],"usage":{self._usage()}{more}}}')

    def _after(self) -> str:
        """What follows the choices of a chunk."""
        if self._wanted.continuous_usage:
            return f',"usage":{self._usage()}'
        return ',"usage":null' if self._wanted.include_usage else ""

    def _metrics(self) -> dict[str, Any] | None:
        return wanted_metrics(self._context.settings, self._wanted.return_metrics, self._generation.stats())

    def _usage(self) -> str:
        return dumps(usage_json(self._generation.usage()))
