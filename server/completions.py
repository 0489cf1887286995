"""POST /v1/completions."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.params import SamplingParams
from engine.request import Request as EngineRequest
from server.answer_grammar import answer_grammar
from server.body import read
from server.context import ServerContext
from server.errors import invalid
from server.generation import check, submit, with_bad_words
from server.openapi import json_body
from server.protocol import CompletionRequest
from server.reply import Reply, new_id
from server.shapes import CompletionShape

_MOST_ENTRIES = 1 << 20


def routes(context: ServerContext) -> APIRouter:
    """The endpoint, bound to `context`."""
    router = APIRouter(tags=["generation"])

    @router.post("/v1/completions", openapi_extra=json_body(CompletionRequest))
    async def create_completion(http: Request) -> Response:
        """Continue one or several prompts, given as text or as token ids."""
        wanted = await read(http, CompletionRequest, context)
        model = context.check_model(wanted.model)
        engine = context.accepting()
        params = wanted.sampling()
        check(context, engine, params, {}, wanted.priority)
        context.check_choices(len(wanted.prompt), params.n)
        keep = context.encoder.kept(wanted.truncate_prompt_tokens, params.max_tokens)
        special = wanted.add_special_tokens is not False
        prompts = await context.off_loop(context.encoder.encode, wanted.prompt, special, keep)
        _check_report(wanted, params, prompts)
        params = await with_bad_words(context, wanted, params)
        grammar = await context.compiled(answer_grammar(wanted.form))
        shape = CompletionShape(engine.tokenizer, wanted, prompts, _echoes(context, wanted, prompts))
        requests = [
            EngineRequest(
                request_id=uuid.uuid4().hex,
                prompt_token_ids=ids,
                params=params,
                cache_salt=wanted.cache_salt or "",
                speculative_tokens=wanted.num_speculative_tokens,
                priority=wanted.priority or 0,
                grammar=grammar,
            )
            for ids in prompts
        ]
        generation = submit(context, engine, requests, {})
        return await Reply(context, wanted, shape, generation, new_id(shape, wanted), model).response(http)

    return router


def _check_report(wanted: CompletionRequest, params: SamplingParams, prompts: list[list[int]]) -> None:
    """Every choice repeats what was said of its prompt: refuse what would take gigabytes to write down."""
    if params.prompt_logprobs is None or len(prompts) * params.n == 1:
        return
    entries = sum(map(len, prompts)) * params.n * (1 + params.prompt_logprobs)
    if entries > _MOST_ENTRIES:
        raise invalid(
            f"Log probabilities of these prompts would be {entries} entries over all choices, "
            f"more than {_MOST_ENTRIES}: ask for fewer at a time.",
            "logprobs" if wanted.prompt_logprobs is None else "prompt_logprobs",
        )


def _echoes(context: ServerContext, wanted: CompletionRequest, prompts: list[list[int]]) -> list[str] | None:
    """The texts of the prompts as the client gave them, or as their tokens have them."""
    if not wanted.echo:
        return None
    whole = wanted.truncate_prompt_tokens is None
    skip = wanted.skip_special_tokens is not False
    return [
        given if whole and isinstance(given, str) else context.encoder.text(ids, skip)
        for given, ids in zip(wanted.prompt, prompts, strict=True)
    ]
