"""A generation as an HTTP reply, whole or streamed; the endpoints differ only in the shape of choices."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from starlette.responses import Response

from server.context import ServerContext
from server.disconnect import ClientGone, gone_response, unless_gone
from server.generation import Generation
from server.protocol import GenerationRequest
from server.request_metrics import metrics_json
from server.shapes import Shape, usage_json
from server.sse import EventStream, dumps, event


def new_id(shape: Shape) -> str:
    """A reply's id, which is the prefix of its engine requests' ids too."""
    return shape.prefix + uuid.uuid4().hex


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
            choices = await unless_gone(http.receive, self._choices())
        except ClientGone:
            return gone_response(http.scope)
        finally:
            self._generation.abort()
        body = self._head | {"choices": choices, "usage": usage_json(self._generation.usage())}
        if self._with_metrics:
            body["metrics"] = self._metrics()
        return Response(dumps(body), media_type="application/json")

    async def _choices(self) -> list[dict[str, Any]]:
        pieces = await self._generation.collected()
        return [self._shape.whole(index, deltas) for index, deltas in enumerate(pieces)]

    async def _events(self) -> AsyncIterator[bytes]:
        """Events, those that arrived together joined, since every write is a system call."""
        shape, wanted = self._shape, self._wanted
        opened: set[int] = set()
        before = f'{dumps(self._head)[:-1]},"choices":['
        async for batch in self._generation.batches():
            choices: list[dict[str, Any]] = []
            for index, delta in batch:
                if index not in opened:
                    opened.add(index)
                    opening = shape.opening(index)
                    if opening is not None:
                        choices.append(opening)
                # Half a character is no news, unless its tokens' log probabilities are.
                if delta.text or delta.logprobs:
                    choices.append(shape.piece(index, delta))
                if delta.finish_reason is not None:
                    choices.append(shape.closing(index, delta))
            if choices:
                after = self._after()
                yield b"".join(event(f"{before}{dumps(choice)}]{after}}}") for choice in choices)
        if wanted.include_usage:
            metrics = f',"metrics":{dumps(self._metrics())}' if self._with_metrics else ""
            yield event(f'{before}],"usage":{self._usage()}{metrics}}}')

    def _after(self) -> str:
        """What follows the choices of a chunk."""
        if self._wanted.continuous_usage:
            return f',"usage":{self._usage()}'
        return ',"usage":null' if self._wanted.include_usage else ""

    @property
    def _with_metrics(self) -> bool:
        settings = self._context.settings
        return settings.enable_per_request_metrics or settings.per_request_spec_decode_metrics != "none"

    def _metrics(self) -> dict[str, Any]:
        settings = self._context.settings
        return metrics_json(
            self._generation.stats(),
            settings.enable_per_request_metrics,
            settings.per_request_spec_decode_metrics,
        )

    def _usage(self) -> str:
        return dumps(usage_json(self._generation.usage()))
