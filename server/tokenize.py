"""POST /tokenize and /detokenize: what a text costs, and what tokens say."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from pydantic import Field, model_validator
from starlette.responses import Response

from server.body import read
from server.context import ServerContext
from server.errors import invalid
from server.openapi import json_body
from server.protocol import Ids, Messages, TemplateOptions, wrong
from server.sse import dumps
from server.strict import Strict

_LONGEST = 1 << 20  # tokens in a body; the size of the body limits texts


class TokenizeRequest(TemplateOptions):
    """A text, or a conversation as the chat template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_two(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("one_of_two", "Give either prompt or messages")
        return self


class DetokenizeRequest(Strict):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[Ids, Field(max_length=_LONGEST)]


def routes(context: ServerContext) -> APIRouter:
    """The endpoints, bound to `context`."""
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize", openapi_extra=json_body(TokenizeRequest))
    async def tokenize(http: Request) -> Response:
        """Token ids of a text or a conversation."""
        wanted = await read(http, TokenizeRequest, context)
        context.check_model(wanted.model)
        reply = await context.off_loop(_tokenized, context, wanted)
        return Response(reply, media_type="application/json")

    @router.post("/detokenize", openapi_extra=json_body(DetokenizeRequest))
    async def detokenize(http: Request) -> Response:
        """The text of token ids, special tokens included."""
        wanted = await read(http, DetokenizeRequest, context)
        context.check_model(wanted.model)
        reply = await context.off_loop(_detokenized, context, wanted)
        return Response(reply, media_type="application/json")

    return router


def _tokenized(context: ServerContext, wanted: TokenizeRequest) -> str:
    engine, ids = context.loaded(), _tokenize(context, wanted)
    texts = [engine.tokenizer.token_text(i) for i in ids] if wanted.return_token_strs else None
    reply = {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids, "token_strs": texts}
    return dumps(reply)


def _detokenized(context: ServerContext, wanted: DetokenizeRequest) -> str:
    vocab_size = context.loaded().tokenizer.vocab_size
    if any(not 0 <= token < vocab_size for token in wanted.tokens):
        raise invalid(f"Token ids must be in [0, {vocab_size}).", "tokens")
    return dumps({"prompt": context.encoder.text(wanted.tokens, False)})


def _tokenize(context: ServerContext, wanted: TokenizeRequest) -> list[int]:
    encoder = context.encoder
    if wanted.prompt is not None:
        return encoder.tokens(wanted.prompt, wanted.add_special_tokens is not False)
    return encoder.render([turn.for_template() for turn in wanted.messages or ()], wanted.template_variables)
