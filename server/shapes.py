"""The two wire forms of a choice, whole and in pieces: text completion and chat completion."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from engine.outputs import OutputDelta, TokenLogprob, Usage
from engine.tokenizer import Tokenizer
from server.chat_answer import ChatAnswer
from server.logprobs import CompletionLogprobs, chat_logprobs, prompt_logprobs
from server.protocol import ChatRequest, CompletionRequest

Choice = dict[str, Any]


class Shape(Protocol):
    """How one endpoint writes choices. One instance a reply: it may remember what it has written."""

    prefix: str
    whole_object: str
    chunk_object: str

    def extra(self, first: OutputDelta) -> dict[str, Any]:
        """What stands beside the choices of a whole reply, or of a stream's first chunk."""

    def opening(self, index: int, first: OutputDelta) -> Choice | None:
        """Sent once a choice, right before its first piece; None sends nothing."""

    def piece(self, index: int, delta: OutputDelta) -> Choice:
        """Text, and log probabilities and token ids if asked for."""

    def closing(self, index: int, delta: OutputDelta) -> Choice:
        """The finish reason."""

    def whole(self, index: int, deltas: Sequence[OutputDelta]) -> Choice:
        """A finished choice at once."""


class CompletionShape:
    """/v1/completions."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(
        self,
        tokenizer: Tokenizer,
        wanted: CompletionRequest,
        prompts: Sequence[Sequence[int]],
        echoes: Sequence[str] | None = None,
    ) -> None:
        """`echoes` are the texts of the prompts, if every choice is to begin with its own."""
        self._tokenizer = tokenizer
        self._wanted = wanted
        self._prompts = prompts
        self._echoes = echoes
        self._written: dict[int, CompletionLogprobs] = {}

    def extra(self, first: OutputDelta) -> dict[str, Any]:
        return {}

    def opening(self, index: int, first: OutputDelta) -> Choice | None:
        ids = self._prompt_ids(index)
        if self._echoes is None:
            return _completion(index, "", None) | ids | {"token_ids": []} if ids else None
        text, logprobs = self._echo(index, first)
        return _completion(index, text, logprobs) | ids | self._ids([])

    def piece(self, index: int, delta: OutputDelta) -> Choice:
        logprobs = self._shape(index, delta.logprobs)
        return _completion(index, delta.text, logprobs) | self._ids(delta.token_ids)

    def closing(self, index: int, delta: OutputDelta) -> Choice:
        return _completion(index, "", None, delta) | self._ids([])

    def whole(self, index: int, deltas: Sequence[OutputDelta]) -> Choice:
        text, logprobs = "", None
        if self._echoes is not None:
            text, logprobs = self._echo(index, deltas[0])
        own = self._shape(index, _entries(deltas))
        if logprobs is not None and own is not None:
            own = {name: logprobs[name] + own[name] for name in own}
        choice = _completion(index, text + _text(deltas), own, deltas[-1])
        if self._wanted.prompt_logprobs is not None:
            entries = deltas[0].prompt_logprobs
            choice["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, entries, self._wanted.prompt_logprobs
            )
        return choice | self._prompt_ids(index) | self._ids(_ids(deltas))

    def _echo(self, index: int, first: OutputDelta) -> tuple[str, dict[str, Any] | None]:
        prompt = index // (self._wanted.n or 1)
        text = (self._echoes or ())[prompt]
        if self._wanted.logprobs is None:
            return text, None
        lists = self._lists(index, self._wanted.logprobs)
        return text, lists.echo(text, self._prompts[prompt], first.prompt_logprobs)

    def _shape(self, index: int, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if self._wanted.logprobs is None:
            return None
        return self._lists(index, self._wanted.logprobs).add(entries)

    def _lists(self, index: int, top: int) -> CompletionLogprobs:
        if index not in self._written:
            shown = self._wanted.skip_special_tokens is False
            skip = frozenset[int]() if shown else self._tokenizer.special_ids
            self._written[index] = CompletionLogprobs(self._tokenizer, skip, top)
        return self._written[index]

    def _prompt_ids(self, index: int) -> dict[str, Any]:
        if not self._wanted.return_token_ids:
            return {}
        return {"prompt_token_ids": list(self._prompts[index // (self._wanted.n or 1)])}

    def _ids(self, ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(ids)} if self._wanted.return_token_ids else {}


class ChatShape:
    """/v1/chat/completions. `answer` makes what a choice's text is read by."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(
        self,
        tokenizer: Tokenizer,
        wanted: ChatRequest,
        prompt: Sequence[int],
        answer: Callable[[], ChatAnswer],
    ) -> None:
        self._tokenizer = tokenizer
        self._wanted = wanted
        self._prompt = prompt
        self._answers: defaultdict[int, ChatAnswer] = defaultdict(answer)

    def extra(self, first: OutputDelta) -> dict[str, Any]:
        wanted = self._wanted
        extra: dict[str, Any] = {}
        if wanted.return_token_ids:
            extra["prompt_token_ids"] = list(self._prompt)
        if wanted.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_logprobs(
                self._tokenizer, first.prompt_logprobs, wanted.prompt_logprobs
            )
        return extra

    def opening(self, index: int, first: OutputDelta) -> Choice | None:
        return _chat_chunk(index, {"role": "assistant", "content": ""}, None)

    def piece(self, index: int, delta: OutputDelta) -> Choice:
        added = self._answers[index].delta(delta.text, delta.finish_reason is not None)
        return _chat_chunk(index, added, self._shape(delta.logprobs)) | self._ids(delta.token_ids)

    def closing(self, index: int, delta: OutputDelta) -> Choice:
        answer = self._answers[index]
        chunk = _chat_chunk(index, answer.delta("", last=True), None, delta)
        return chunk | {"finish_reason": answer.finish_reason(delta.finish_reason)}

    def whole(self, index: int, deltas: Sequence[OutputDelta]) -> Choice:
        answer = self._answers[index]
        choice = {
            "index": index,
            "message": answer.message(_text(deltas)),
            "logprobs": self._shape(_entries(deltas)),
            "finish_reason": answer.finish_reason(deltas[-1].finish_reason),
            "stop_reason": deltas[-1].stop_reason,
        }
        return choice | self._ids(_ids(deltas))

    def _shape(self, entries: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, entries) if self._wanted.logprobs else None

    def _ids(self, ids: Sequence[int]) -> dict[str, Any]:
        return {"token_ids": list(ids)} if self._wanted.return_token_ids else {}


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


def _chat_chunk(index: int, delta: dict[str, Any], logprobs: Any, last: OutputDelta | None = None) -> Choice:
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


def _ids(deltas: Sequence[OutputDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]
