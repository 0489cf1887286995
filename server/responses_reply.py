"""A generation as /v1/responses writes it: one message of one text, whole or as typed events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from engine.outputs import OutputDelta, Usage
from engine.params import SamplingParams
from server.context import ServerContext
from server.disconnect import ClientGone, gone_response, unless_gone
from server.errors import ApiError
from server.generation import Generation
from server.logprobs import chat_logprobs
from server.pacing import Pacer, joined
from server.responses_protocol import ResponsesRequest
from server.sse import EventStream, dumps


class ResponsesReply:
    """Writes one reply of `generation`, which belongs to it from now on."""

    def __init__(
        self,
        context: ServerContext,
        wanted: ResponsesRequest,
        params: SamplingParams,
        generation: Generation,
        model: str,
    ) -> None:
        self._context = context
        self._wanted = wanted
        self._params = params
        self._generation = generation
        self._model = model
        self._tokenizer = context.loaded().tokenizer
        self._created = int(time.time())
        name = wanted.request_id or uuid.uuid4().hex
        self._id, self._message_id = f"resp_{name}", f"msg_{name}"
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
        return Response(dumps(self._body(joined(deltas))), media_type="application/json")

    async def _events(self) -> AsyncIterator[bytes]:
        pacer = Pacer(self._context.settings.stream_interval)
        pieces: list[OutputDelta] = []
        place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        async for batch in self._generation.batches():
            data = b""
            if not pieces:  # with the first token, so that a failure before it is a plain error
                data += self._event("response.created", response=self._body(None))
                data += self._event("response.in_progress", response=self._body(None))
                item = self._item("in_progress", None)
                data += self._event("response.output_item.added", output_index=0, item=item)
                data += self._event("response.content_part.added", **place, part=self._part(None))
            for _, arrived in batch:
                pieces.append(arrived)
                delta = pacer.add(0, arrived)
                if delta is not None and (delta.text or delta.logprobs):
                    logprobs = self._logprobs(delta)
                    data += self._event(
                        "response.output_text.delta", **place, delta=delta.text, logprobs=logprobs
                    )
            if data:
                yield data
        whole = joined(pieces)
        body = self._body(whole)
        data = self._event(
            "response.output_text.done", **place, text=whole.text, logprobs=self._logprobs(whole)
        )
        data += self._event("response.content_part.done", **place, part=self._part(whole))
        data += self._event("response.output_item.done", output_index=0, item=body["output"][0])
        yield data + self._event(f"response.{body['status']}", response=body)

    def _event(self, kind: str, **fields: Any) -> bytes:
        content = {"type": kind, "sequence_number": self._events_sent} | fields
        self._events_sent += 1
        return f"event: {kind}\ndata: {dumps(content)}\n\n".encode()

    def _failed(self, failure: ApiError) -> bytes:
        """As the documentation has it, and as the official client raises it."""
        told = {"code": failure.code, "message": failure.message, "param": failure.param}
        return self._event("error", **told, **failure.body())

    def _body(self, whole: OutputDelta | None) -> dict[str, Any]:
        """The response object; `whole` None: it has only begun."""
        wanted, params = self._wanted, self._params
        status = "in_progress" if whole is None else _status(whole)
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": cut,
            "instructions": wanted.instructions,
            "max_output_tokens": wanted.max_output_tokens,
            "model": self._model,
            "output": [] if whole is None else [self._item(status, whole)],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_logprobs": params.logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None if whole is None else _usage(self._generation.usage()),
            "metadata": {},
        }

    def _item(self, status: str, whole: OutputDelta | None) -> dict[str, Any]:
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [] if whole is None else [self._part(whole)],
        }

    def _part(self, whole: OutputDelta | None) -> dict[str, Any]:
        text, logprobs = ("", []) if whole is None else (whole.text, self._logprobs(whole))
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, delta: OutputDelta) -> Sequence[dict[str, Any]]:
        entries: Sequence[dict[str, Any]] = chat_logprobs(self._tokenizer, delta.logprobs)["content"]
        return entries


def _status(whole: OutputDelta) -> str:
    return "incomplete" if whole.finish_reason == "length" else "completed"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
