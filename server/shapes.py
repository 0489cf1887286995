"""The two wire forms of a choice, whole and in pieces: text completion and chat completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from engine.outputs import OutputDelta, TokenLogprob, Usage
from engine.tokenizer import Tokenizer
from server.logprobs import CompletionLogprobs, chat_logprobs

Choice = dict[str, Any]


class Shape(Protocol):
    """How one endpoint writes choices. One instance a reply: it may remember what it has written."""

    prefix: str
    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> Choice | None:
        """Sent once a choice, right before its first piece; None sends nothing."""

    def piece(self, index: int, delta: OutputDelta) -> Choice:
        """Text, and log probabilities if asked for."""

    def closing(self, index: int, delta: OutputDelta) -> Choice:
        """The finish reason."""

    def whole(self, index: int, deltas: Sequence[OutputDelta]) -> Choice:
        """A finished choice at once."""


class CompletionShape:
    """/v1/completions."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, tokenizer: Tokenizer, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs
        self._written: dict[int, CompletionLogprobs] = {}

    def opening(self, index: int) -> Choice | None:
        return None

    def piece(self, index: int, delta: OutputDelta) -> Choice:
        return _completion(index, delta.text, self._shape(index, delta.logprobs))

    def closing(self, index: int, delta: OutputDelta) -> Choice:
        return _completion(index, "", None, delta)

    def whole(self, index: int, deltas: Sequence[OutputDelta]) -> Choice:
        return _completion(index, _text(deltas), self._shape(index, _entries(deltas)), deltas[-1])

    def _shape(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        if index not in self._written:
            self._written[index] = CompletionLogprobs(self._tokenizer)
        return self._written[index].add(entries)


class ChatShape:
    """/v1/chat/completions."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._logprobs = logprobs

    def opening(self, index: int) -> Choice | None:
        return _chat_chunk(index, {"role": "assistant", "content": ""}, None)

    def piece(self, index: int, delta: OutputDelta) -> Choice:
        return _chat_chunk(index, {"content": delta.text}, self._shape(delta.logprobs))

    def closing(self, index: int, delta: OutputDelta) -> Choice:
        return _chat_chunk(index, {}, None, delta)

    def whole(self, index: int, deltas: Sequence[OutputDelta]) -> Choice:
        return {
            "index": index,
            "message": {"role": "assistant", "content": _text(deltas), "refusal": None},
            "logprobs": self._shape(_entries(deltas)),
            "finish_reason": deltas[-1].finish_reason,
            "stop_reason": deltas[-1].stop_reason,
        }

    def _shape(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, entries) if self._logprobs else None


def usage_json(usage: Usage) -> dict[str, Any]:
    """Token counts as OpenAI has them; drafted tokens are its "prediction" tokens."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.draft_tokens - usage.accepted_tokens,
        },
    }


def _completion(index: int, text: str, logprobs: Any, last: OutputDelta | None = None) -> Choice:
    choice: Choice = {"index": index, "text": text, "logprobs": logprobs}
    return choice | _ending(last)


def _chat_chunk(index: int, delta: dict[str, str], logprobs: Any, last: OutputDelta | None = None) -> Choice:
    choice: Choice = {"index": index, "delta": delta, "logprobs": logprobs}
    return choice | _ending(last)


def _ending(last: OutputDelta | None) -> Choice:
    if last is None:
        return {"finish_reason": None}
    return {"finish_reason": last.finish_reason, "stop_reason": last.stop_reason}


def _text(deltas: Sequence[OutputDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def _entries(deltas: Sequence[OutputDelta]) -> list[TokenLogprob]:
    return [entry for delta in deltas for entry in delta.logprobs]
