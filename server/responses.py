"""POST /v1/responses: OpenAI's newer endpoint, without anything that it would keep."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.body import read
from server.context import ServerContext
from server.conversation import prepared
from server.errors import invalid
from server.generation import check, submit
from server.openapi import json_body
from server.responses_protocol import ResponsesRequest
from server.responses_reply import ResponsesReply

_NAMES = {
    "messages": "input",
    "prompt": "input",
    "logprobs": "top_logprobs",
    "max_tokens": "max_output_tokens",
}


def routes(context: ServerContext) -> APIRouter:
    """The endpoint, bound to `context`."""
    router = APIRouter(tags=["generation"])

    @router.post("/v1/responses", openapi_extra=json_body(ResponsesRequest))
    async def create_response(http: Request) -> Response:
        """Answer a text or a conversation. Nothing is stored: send the whole conversation each time."""
        wanted = await read(http, ResponsesRequest, context)
        model = context.check_model(wanted.model)
        engine = context.accepting()
        params = wanted.sampling()
        check(context, engine, params, _NAMES, wanted.priority)
        plan = context.ways.plan(wanted.turns, wanted.tool_use, wanted.form)
        asked = await prepared(context, engine, wanted, params, plan, {}, "input")
        if params.logprobs is not None and not asked.plain:
            raise invalid("Logprobs come with plain text only: without tools and thoughts.", "top_logprobs")
        generation = submit(context, engine, [asked.request], _NAMES)
        return await ResponsesReply(context, wanted, asked, generation, model).response(http)

    return router
