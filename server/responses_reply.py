"""A generation as /v1/responses writes it: items of output, whole or as typed events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from starlette.responses import Response

from engine.outputs import OutputDelta, Usage
from server.context import ServerContext
from server.conversation import Conversation
from server.disconnect import ClientGone, gone_response, unless_gone
from server.errors import ApiError
from server.generation import Generation
from server.logprobs import LONG, chat_logprobs
from server.pacing import Pacer, joined
from server.request_metrics import wanted_metrics
from server.responses_items import Event, OutputItems, Status
from server.responses_protocol import ResponsesRequest
from server.sse import EventStream, dumps


class ResponsesReply:
    """Writes one reply of `generation`, which belongs to it from now on."""

    def __init__(
        self,
        context: ServerContext,
        wanted: ResponsesRequest,
        asked: Conversation,
        generation: Generation,
        model: str,
    ) -> None:
        self._context = context
        self._wanted = wanted
        self._params = asked.request.params
        self._generation = generation
        self._model = model
        self._tokenizer = context.loaded().tokenizer
        self._created = int(time.time())
        name = wanted.request_id or uuid.uuid4().hex
        self._id = f"resp_{name}"
        self._items = OutputItems(name, asked.splitter(), asked.calls)
        self._status: Status = "in_progress"
        self._events_sent = 0

    async def response(self, http: Request) -> Response:
        """The reply in the form that the client asked for; raises ApiError if it failed."""
        if self._wanted.stream:
            keep_alive = self._context.settings.sse_keep_alive_interval
            return EventStream(self._events(), self._generation.abort, keep_alive, self._failed, b"")
        try:
            (deltas,) = await unless_gone(http.receive, self._generation.collected())
        except ClientGone:
            return gone_response(http.scope)
        finally:
            self._generation.abort()
        whole = joined(deltas)
        if len(whole.logprobs) > LONG:
            text = await self._context.off_loop(self._whole, whole)
        else:
            text = self._whole(whole)
        return Response(text, media_type="application/json")

    def _whole(self, delta: OutputDelta) -> str:
        self._take(delta)
        return dumps(self._body())

    async def _events(self) -> AsyncIterator[bytes]:
        pacer = Pacer(self._context.settings.stream_interval)
        async for batch in self._generation.batches():
            events: list[Event] = []
            if not self._events_sent:  # with the first token, so that a failure before it is a plain error
                events += [(kind, {"response": self._body()}) for kind in ("created", "in_progress")]
            for _, arrived in batch:
                delta = pacer.add(0, arrived)
                if delta is not None:
                    events += self._take(delta)
            if events:
                yield b"".join(self._event(f"response.{kind}", fields) for kind, fields in events)
        yield self._event(f"response.{self._status}", {"response": self._body()})

    def _take(self, delta: OutputDelta) -> list[Event]:
        """Add to the output, and close it with the last delta."""
        logprobs = chat_logprobs(self._tokenizer, delta.logprobs)["content"]
        events = self._items.add(delta.text, logprobs)
        if delta.finish_reason is not None:
            self._status = "incomplete" if delta.finish_reason == "length" else "completed"
            events += self._items.end(self._status)
        return events

    def _event(self, kind: str, fields: dict[str, Any]) -> bytes:
        content = {"type": kind, "sequence_number": self._events_sent} | fields
        self._events_sent += 1
        return f"event: {kind}\ndata: {dumps(content)}\n\n".encode()

    def _failed(self, failure: ApiError) -> bytes:
        """As the documentation has it, and as the official client raises it."""
        told = {"code": failure.code, "message": failure.message, "param": failure.param}
        return self._event("error", told | failure.body())

    def _body(self) -> dict[str, Any]:
        """The response object as far as it has come."""
        wanted, params = self._wanted, self._params
        begun = self._status == "in_progress"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "instructions": wanted.instructions,
            "max_output_tokens": wanted.max_output_tokens,
            "model": self._model,
            "output": list(self._items.done),
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "top_logprobs": params.logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if begun else _usage(self._generation.usage()),
            "metadata": {},
            **wanted.echoed,
            **({} if begun else self._metrics()),
        }

    def _metrics(self) -> dict[str, Any]:
        settings, asked = self._context.settings, self._wanted.return_metrics
        metrics = wanted_metrics(settings, asked, self._generation.stats())
        return {} if metrics is None else {"metrics": metrics}


def _usage(usage: Usage) -> dict[str, Any]:
    """Tokens of thoughts are among the others: they are not counted apart."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
