"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.params import ParamError
from engine.request import Request as EngineRequest
from server.body import read
from server.context import ServerContext
from server.errors import translate
from server.generation import submit
from server.openapi import json_body
from server.protocol import CompletionRequest
from server.reply import Reply, new_id
from server.shapes import CompletionShape


def routes(context: ServerContext) -> APIRouter:
    """The endpoint, bound to `context`."""
    router = APIRouter(tags=["generation"])

    @router.post("/v1/completions", openapi_extra=json_body(CompletionRequest))
    async def create_completion(http: Request) -> Response:
        """Continue one or several prompts, given as text or as token ids."""
        wanted = await read(http, CompletionRequest, context.body_limit, context.off_loop)
        model = context.check_model(wanted.model)
        engine = context.accepting()
        params = wanted.sampling()
        try:
            params.check(engine.tokenizer.vocab_size, context.settings.max_logprobs)
        except ParamError as exc:
            raise translate(exc) from None
        context.check_choices(len(wanted.prompt), params.n)
        prompts = await context.off_loop(context.encoder.encode, wanted.prompt)
        shape = CompletionShape(engine.tokenizer, wanted.logprobs is not None)
        reply_id = new_id(shape)
        requests = [
            EngineRequest(
                request_id=f"{reply_id}-{place}",
                prompt_token_ids=ids,
                params=params,
                cache_salt=wanted.cache_salt or "",
                speculative_tokens=wanted.num_speculative_tokens,
            )
            for place, ids in enumerate(prompts)
        ]
        generation = submit(context, engine, requests, {})
        return await Reply(context, wanted, shape, generation, reply_id, model).response(http)

    return router
