"""What clients may send to the generating endpoints. Types are strict: "1" is no number, 1 is no flag."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator
from pydantic_core import PydanticCustomError

from engine.params import SamplingParams
from server.errors import invalid
from server.strict import Strict
from server.structured import Form, ResponseFormat, StructuredOutputs, form_of
from server.tools import NamedTool, Tool, ToolCall, ToolChoice, ToolUse


def _once(value: list[int]) -> list[int]:
    return list(dict.fromkeys(value))


Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[Int], Field(fail_fast=True)]
#: tokens of a vocabulary; how often one of them is named does not matter
TokenSet = Annotated[list[Int], Field(fail_fast=True, max_length=1 << 19), AfterValidator(_once)]
BadWord = Annotated[str, Field(min_length=1, max_length=256)]
ReplyId = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]

_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_tokens",
    "stop",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "ignore_eos",
    "seed",
    "n",
    "prompt_logprobs",
)


def wrong(kind: str, message: str) -> PydanticCustomError:
    return PydanticCustomError(kind, message)


def _prompts(value: Any) -> list[str] | list[list[int]]:
    """Bring the four ways to write a prompt into one: a list of texts or a list of token lists."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) is str for item in value):
            return value
        if _are_ids(value):
            return [value]
        if all(type(item) is list and _are_ids(item) for item in value):
            return value
    raise wrong(
        "prompt_type",
        "Input should be a string, a list of strings, a list of token ids or a list of such lists",
    )


def _are_ids(items: Iterable[Any]) -> bool:
    return all(type(item) is int for item in items)


def _stop(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and all(type(item) is str for item in value):
        return tuple(value)
    raise wrong("stop_type", "Input should be a string or a list of strings")


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise wrong("logit_bias_type", "Input should be an object that maps token ids to numbers")
    result: dict[int, float] = {}
    for token, bias in value.items():
        if not (token.isascii() and token.isdecimal() and len(token) <= 10):
            raise wrong("logit_bias_key", "Keys should be token ids")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise wrong("logit_bias_value", "Values should be numbers between -100 and 100")
        result[int(token)] = float(bias)
    return result


def _content(value: Any) -> str:
    """The text of a message; parts are joined by line breaks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise wrong("content_type", "Input should be a string or a list of text parts")
    texts: list[str] = []
    for part in value:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise wrong("content_part", f"Part {len(texts)} should be a text part: only text is supported")
        texts.append(part["text"])
    return "\n".join(texts)


def _truncation(value: int) -> int:
    if value != -1 and value < 1:
        raise wrong("truncation", "Input should be positive, or -1 for as many tokens as fit")
    return value


def _own_names(value: dict[str, Any]) -> dict[str, Any]:
    for name in ("self", "messages", "tools", "add_generation_prompt", "continue_final_message"):
        if name in value:
            raise wrong("template_variable", f"{name} is no name for a variable of the template")
    return value


def without_empty_extras(value: Any) -> Any:
    """Drop what client libraries add to an assistant's message when they send it back."""
    if not isinstance(value, dict):
        return value
    empty = ("refusal", "audio", "annotations", "function_call", "tool_calls", "name", "reasoning_content")
    kept = {key: item for key, item in value.items() if key not in empty or (item is not None and item != [])}
    if kept.get("tool_calls") and kept.get("content") is None:  # a turn of nothing but calls
        kept["content"] = ""
    return kept


class TemplateOptions(Strict):
    """What a chat template is told beside the messages."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_own_names)] | None = None

    @property
    def template_variables(self) -> dict[str, Any]:
        """Keyword arguments of the tokenizer's apply_chat_template."""
        return {
            "add_generation_prompt": self.add_generation_prompt is not False,
            "continue_final_message": bool(self.continue_final_message),
            **(self.chat_template_kwargs or {}),
        }


class StreamOptions(Strict):
    """What comes with a stream beside its text: usage, at its end or with every chunk; how tokens arose."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None
    include_speculation: bool | None = None


class GenerationRequest(Strict):
    """The fields that both endpoints share. None everywhere means "not given"."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(_logit_bias, dict[str, float])] | None = None
    seed: Int | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_stop, str | list[str])] | None = None
    stop_token_ids: TokenSet | None = None
    allowed_token_ids: TokenSet | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=256, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    min_tokens: Int | None = None
    max_tokens: Int | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Int | None = None
    truncate_prompt_tokens: Annotated[Int, AfterValidator(_truncation)] | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    num_speculative_tokens: Count | None = None
    priority: Int | None = None
    request_id: ReplyId | None = None
    return_token_ids: bool | None = None
    return_metrics: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def form(self) -> Form | None:
        """What the answer must look like; raises ApiError."""
        schema = None if self.response_format is None else self.response_format.schema_of_answer
        return form_of(schema, "response_format", self.structured_outputs)

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def include_speculation(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_speculation)

    def _sampling(self, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        if self.stream and self.prompt_logprobs is not None:
            raise invalid(
                "prompt_logprobs come with a whole reply only, not with a stream.", "prompt_logprobs"
            )
        given = {name: getattr(self, name) for name in _SAMPLING if getattr(self, name) is not None}
        for name in ("stop_token_ids", "allowed_token_ids"):
            if getattr(self, name) is not None:
                given[name] = tuple(getattr(self, name))
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions."""

    prompt: Annotated[
        list[str] | list[list[int]],
        PlainValidator(_prompts, str | list[str] | list[int] | list[list[int]]),
    ]
    logprobs: Int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    def sampling(self) -> SamplingParams:
        limit = 16 if self.max_tokens is None else self.max_tokens
        if limit == 0 and not self.echo and self.prompt_logprobs is None:
            raise invalid("max_tokens may be 0 only with echo or prompt_logprobs.", "max_tokens")
        params = self._sampling(limit, self.logprobs)
        if self.echo and self.logprobs is not None:  # they cover the prompt as well
            return replace(params, prompt_logprobs=max(self.logprobs, self.prompt_logprobs or 0))
        return params


class Message(Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, PlainValidator(_content, str | list[dict[str, str]])]
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates know it: none of them has the developer role, which is OpenAI's new system."""
        turn = self.model_dump(exclude_none=True, exclude={"tool_calls"})
        if self.tool_calls:
            turn["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return turn | {"role": "system"} if self.role == "developer" else turn


Messages = Annotated[
    list[Annotated[Message, BeforeValidator(without_empty_extras)]], Field(min_length=1, fail_fast=True)
]


class ChatRequest(GenerationRequest, TemplateOptions):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Int | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: ToolChoice | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    @property
    def turns(self) -> list[dict[str, Any]]:
        """The conversation for a chat template."""
        return [message.for_template() for message in self.messages]

    @property
    def tool_use(self) -> ToolUse:
        functions = [tool.function for tool in self.tools or ()]
        choice, parallel = self.tool_choice or "auto", self.parallel_tool_calls is not False
        if isinstance(choice, NamedTool):
            return ToolUse(functions, "required", choice.function.name, parallel)
        return ToolUse(functions, choice, parallel=parallel)

    def sampling(self) -> SamplingParams:
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        if limit == 0 and self.prompt_logprobs is None:
            limit_name = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
            raise invalid(f"{limit_name} may be 0 only with prompt_logprobs.", limit_name)
        return self._sampling(limit, (self.top_logprobs or 0) if self.logprobs else None)
