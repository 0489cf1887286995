"""POST /v1/responses: OpenAI's newer endpoint, without anything that it would keep."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.request import Request as EngineRequest
from server.body import read
from server.context import ServerContext
from server.generation import check, submit, with_bad_words
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
        check(context, engine, params, _NAMES)
        keep = context.encoder.kept(wanted.truncate_prompt_tokens, params.max_tokens)
        prompt = await context.off_loop(context.encoder.render, wanted.turns, {}, keep, "input")
        params = await with_bad_words(context, wanted, params)
        request = EngineRequest(
            request_id=uuid.uuid4().hex,
            prompt_token_ids=prompt,
            params=params,
            cache_salt=wanted.cache_salt or "",
            speculative_tokens=wanted.num_speculative_tokens,
            priority=wanted.priority or 0,
        )
        generation = submit(context, engine, [request], _NAMES)
        return await ResponsesReply(context, wanted, params, generation, model).response(http)

    return router
