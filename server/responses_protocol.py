"""What clients may send to /v1/responses: items, tools, forms, and nothing that would have to be kept."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from engine.params import SamplingParams
from server.errors import invalid
from server.protocol import GenerationRequest, Int, wrong
from server.responses_input import Turn, turns_of
from server.strict import Strict
from server.structured import Form, TextFormat, form_of
from server.tools import FlatNamedTool, Function, ToolChoice, ToolUse

Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]

_LOGPROBS = "message.output_text.logprobs"
#: fields of the other endpoints that would change this one's reply
_ELSEWHERE = ("n", "max_tokens", "prompt_logprobs", "return_token_ids", "response_format")


def _function(value: Any) -> Any:
    """A tool without its type, of which there is one."""
    if not isinstance(value, dict):
        return value
    if value.get("type") != "function":
        raise wrong("tool_type", 'Tools should have the type "function": no others are supported')
    return {name: given for name, given in value.items() if name != "type"}


class TextOptions(Strict):
    """What the text of the answer is like."""

    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ResponsesRequest(GenerationRequest):
    """POST /v1/responses."""

    input: Annotated[list[Turn], PlainValidator(turns_of, str | list[dict[str, Any]])]
    instructions: str | None = None
    max_output_tokens: Annotated[Int, Field(ge=1)] | None = None
    top_logprobs: Int | None = None
    include: Annotated[list[Included], Field(max_length=16, fail_fast=True)] | None = None
    text: TextOptions | None = None
    tools: (
        Annotated[
            list[Annotated[Function, BeforeValidator(_function, dict[str, Any])]],
            Field(max_length=128, fail_fast=True),
        ]
        | None
    ) = None
    tool_choice: ToolChoice | FlatNamedTool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def turns(self) -> list[Turn]:
        """The conversation, instructions first."""
        told = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return told + self.input

    @property
    def tool_use(self) -> ToolUse:
        functions, parallel = self.tools or [], self.parallel_tool_calls is not False
        choice = self.tool_choice or "auto"
        if isinstance(choice, FlatNamedTool):
            return ToolUse(functions, "required", choice.name, parallel)
        return ToolUse(functions, choice, parallel=parallel)

    @property
    def text_format(self) -> TextFormat:
        """What was asked for, or what that means."""
        return (self.text and self.text.format) or TextFormat(type="text")

    @property
    def form(self) -> Form | None:
        return form_of(self.text_format.schema_of_answer, "text.format", self.structured_outputs)

    def sampling(self) -> SamplingParams:
        for name in _ELSEWHERE:
            if getattr(self, name) is not None:
                raise invalid(f"{name} is not supported by this endpoint.", name, "unsupported_parameter")
        if self.include_speculation:
            name = "stream_options.include_speculation"
            raise invalid(f"{name} is not supported by this endpoint.", name, "unsupported_parameter")
        reported = self.top_logprobs is not None or _LOGPROBS in (self.include or ())
        return self._sampling(self.max_output_tokens, (self.top_logprobs or 0) if reported else None)

    @property
    def echoed(self) -> dict[str, Any]:
        """How a response repeats what was asked of tools and text."""
        choice = self.tool_choice or "auto"
        tools = [{"type": "function"} | each.model_dump() for each in self.tools or ()]
        return {
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "text": {"format": self.text_format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice.model_dump() if isinstance(choice, FlatNamedTool) else choice,
            "tools": tools,
        }
