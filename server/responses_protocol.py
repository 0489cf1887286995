"""What clients may send to /v1/responses: text in, text out, and nothing that would have to be remembered."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from engine.params import SamplingParams
from server.errors import invalid
from server.protocol import GenerationRequest, Int, wrong

_ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text")
_LOGPROBS = "message.output_text.logprobs"
#: fields of the other endpoints that would change this one's reply
_ELSEWHERE = (
    "n",
    "max_tokens",
    "prompt_logprobs",
    "return_token_ids",
    "response_format",
    "structured_outputs",
)

Turn = dict[str, str]


def _input(value: Any) -> list[Turn]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise wrong("input_type", "Input should be a string or a list of messages")
    return [_turn(item, f"Item {place}") for place, item in enumerate(value)]


def _turn(item: Any, place: str) -> Turn:
    if not isinstance(item, dict) or item.get("type", "message") != "message":
        raise wrong("input_item", f"{place} should be a message: no other items are supported")
    if item.get("role") not in _ROLES:
        raise wrong("input_role", f"{place} should have one of the roles {', '.join(_ROLES)}")
    role = "system" if item["role"] == "developer" else item["role"]
    content = item.get("content")
    if isinstance(content, list) and content:
        content = "\n".join(_part(part, place) for part in content)
    if not isinstance(content, str):
        raise wrong("input_content", f"{place} should have a text or a list of text parts as its content")
    return {"role": role, "content": content}


def _part(part: Any, place: str) -> str:
    if not isinstance(part, dict) or part.get("type") not in _TEXT_PARTS or type(part.get("text")) is not str:
        raise wrong("input_part", f"{place} should have text parts only: nothing else is supported")
    text: str = part["text"]
    return text


def _text_options(value: Any) -> dict[str, Any]:
    plain = {"format": ({"type": "text"}, None), "verbosity": ("medium", None)}
    if not isinstance(value, dict):
        raise wrong("text_type", "Input should be an object")
    for name, given in value.items():
        if given not in plain.get(name, ()):
            raise wrong("text_option", f"this value of {name[:40]} is not supported")
    return value


class ResponsesRequest(GenerationRequest):
    """POST /v1/responses."""

    input: Annotated[list[Turn], PlainValidator(_input, str | list[dict[str, Any]])]
    instructions: str | None = None
    max_output_tokens: Annotated[Int, Field(ge=1)] | None = None
    top_logprobs: Int | None = None
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = None
    text: Annotated[dict[str, Any], PlainValidator(_text_options, dict[str, Any])] | None = None

    @property
    def turns(self) -> list[Turn]:
        """The conversation, instructions first."""
        told = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return told + self.input

    def sampling(self) -> SamplingParams:
        for name in _ELSEWHERE:
            if getattr(self, name) is not None:
                raise invalid(f"{name} is not supported by this endpoint.", name, "unsupported_parameter")
        reported = self.top_logprobs is not None or _LOGPROBS in (self.include or ())
        return self._sampling(self.max_output_tokens, (self.top_logprobs or 0) if reported else None)
