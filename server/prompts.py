"""Prompts to token ids. These functions may take long: call them through ServerContext.off_loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.async_engine import AsyncEngine
from engine.chat_template import ChatTemplateError
from engine.tokenizer import Tokenizer
from server.errors import ApiError, invalid


class PromptEncoder:
    """Encodes for one engine, and refuses at once what cannot fit its context."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._tokenizer: Tokenizer = engine.tokenizer
        self._max_tokens = engine.max_model_len
        longest_token = max(map(len, engine.tokenizer.token_bytes), default=1)
        self._max_chars = engine.max_model_len * max(1, longest_token)

    def encode(self, prompts: Sequence[str] | Sequence[Sequence[int]]) -> list[list[int]]:
        """Token ids of every prompt of a completions request."""
        return [self._one(prompt) for prompt in prompts]

    def render(self, messages: Sequence[dict[str, str]], variables: dict[str, Any]) -> list[int]:
        """Token ids of a conversation, through the model's chat template."""
        if not self._tokenizer.has_chat_template:
            raise invalid(
                "This model has no chat template: serve it with --chat-template, or use /v1/completions.",
                "messages",
                "no_chat_template",
            )
        self._check_length(sum(len(message["content"]) for message in messages), "messages")
        try:
            ids = self._tokenizer.apply_chat_template(messages, **variables)
        except ChatTemplateError as exc:
            raise invalid(str(exc), "messages", "chat_template_error") from None
        return _not_empty(ids, "messages")

    def _one(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            self._check_length(len(prompt), "prompt")
            return _not_empty(self._tokenizer.encode(prompt), "prompt")
        ids = _not_empty(list(prompt), "prompt")
        if min(ids) < 0 or max(ids) >= self._tokenizer.vocab_size:
            raise invalid(f"Token ids must be in [0, {self._tokenizer.vocab_size}).", "prompt")
        return ids

    def _check_length(self, chars: int, param: str) -> None:
        """Refuse a text that is too long even if the model's longest token filled it."""
        if chars > self._max_chars:
            raise ApiError(
                400,
                f"A text of {chars} characters cannot fit the context of {self._max_tokens} tokens.",
                param=param,
                code="context_length_exceeded",
            )


def _not_empty(ids: list[int], param: str) -> list[int]:
    if not ids:
        raise invalid("The prompt holds no token.", param)
    return ids
