"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.body import read
from server.chat_answer import ChatAnswer
from server.context import ServerContext
from server.conversation import prepared
from server.errors import invalid
from server.generation import check, submit
from server.openapi import json_body
from server.protocol import ChatRequest
from server.reply import Reply, new_id
from server.shapes import ChatShape


def routes(context: ServerContext) -> APIRouter:
    """The endpoint, bound to `context`."""
    router = APIRouter(tags=["generation"])

    @router.post("/v1/chat/completions", openapi_extra=json_body(ChatRequest))
    async def create_chat_completion(http: Request) -> Response:
        """Answer a conversation."""
        wanted = await read(http, ChatRequest, context)
        model = context.check_model(wanted.model)
        _check_combinations(wanted)
        engine = context.accepting()
        params = wanted.sampling()
        names = _names(wanted)
        check(context, engine, params, names, wanted.priority)
        context.check_choices(1, params.n)
        plan = context.ways.plan(wanted.turns, wanted.tool_use, wanted.form)
        variables = wanted.template_variables
        asked = await prepared(context, engine, wanted, params, plan, variables, "messages")
        shape = ChatShape(
            engine.tokenizer,
            wanted,
            asked.request.prompt_token_ids,
            lambda: ChatAnswer(asked.splitter(), asked.calls),
        )
        generation = submit(context, engine, [asked.request], names)
        return await Reply(context, wanted, shape, generation, new_id(shape, wanted), model).response(http)

    return router


def _names(wanted: ChatRequest) -> dict[str, str]:
    """The engine's parameter names in this endpoint's words."""
    limit = "max_tokens" if wanted.max_completion_tokens is None else "max_completion_tokens"
    return {"prompt": "messages", "logprobs": "top_logprobs", "max_tokens": limit}


def _check_combinations(wanted: ChatRequest) -> None:
    if wanted.top_logprobs is not None and not wanted.logprobs:
        raise invalid("top_logprobs needs logprobs to be true.", "top_logprobs")
    if wanted.continue_final_message:
        if wanted.add_generation_prompt:
            raise invalid(
                "add_generation_prompt and continue_final_message exclude each other.",
                "continue_final_message",
            )
        if wanted.messages[-1].role != "assistant":
            raise invalid("The message to continue must be the assistant's.", "continue_final_message")
