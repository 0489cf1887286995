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

    def encode(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        add_special_tokens: bool = True,
        keep: int | None = None,
    ) -> list[list[int]]:
        """Token ids of every prompt of a completions request; of each the last `keep`, if that is given."""
        return [self._one(prompt, add_special_tokens, keep) for prompt in prompts]

    def tokens(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of any text that is not hopelessly long for the context; perhaps none."""
        self._check_length(len(text), "prompt")
        return self._tokenizer.encode(text, add_special_tokens)

    def kept(self, truncate: int | None, max_tokens: int | None) -> int | None:
        """How many tokens truncate_prompt_tokens leaves of a prompt; -1 is what fits beside the answer."""
        if truncate != -1:
            return truncate
        return max(1, self._max_tokens - (1 if max_tokens is None else max_tokens))

    def bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """How each word is spelt in tokens, at the beginning of a text and behind a space."""
        texts = [text for word in words for text in (word, " " + word.lstrip())]
        spelt = (tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts)
        return tuple(dict.fromkeys(ids for ids in spelt if ids))

    def text(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """What tokens say, by the same rules as for those that are generated."""
        skip = self._tokenizer.special_ids if skip_special_tokens else frozenset()
        known = self._tokenizer.token_bytes
        return b"".join(known[i] for i in ids if i not in skip).decode(errors="replace")

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        variables: dict[str, Any],
        keep: int | None = None,
        param: str = "messages",
    ) -> list[int]:
        """Token ids of a conversation, through the model's chat template. `param` is what errors name."""
        if not self._tokenizer.has_chat_template:
            raise invalid(
                "This model has no chat template: serve it with --chat-template, or use /v1/completions.",
                param,
                "no_chat_template",
            )
        self._check_length(sum(len(message["content"]) for message in messages), param)
        try:
            ids = self._tokenizer.apply_chat_template(messages, **variables)
        except ChatTemplateError as exc:
            raise invalid(str(exc), param, "chat_template_error") from None
        return _last(_not_empty(ids, param), keep)

    def _one(self, prompt: str | Sequence[int], add_special_tokens: bool, keep: int | None) -> list[int]:
        if isinstance(prompt, str):
            if keep is None:
                self._check_length(len(prompt), "prompt")
            else:  # what lies further back than any kept token can reach need not be read
                prompt = prompt[-self._max_chars :]
            return _last(_not_empty(self._tokenizer.encode(prompt, add_special_tokens), "prompt"), keep)
        ids = _not_empty(list(prompt), "prompt")
        if min(ids) < 0 or max(ids) >= self._tokenizer.vocab_size:
            raise invalid(f"Token ids must be in [0, {self._tokenizer.vocab_size}).", "prompt")
        return _last(ids, keep)

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


def _last(ids: list[int], keep: int | None) -> list[int]:
    return ids if keep is None else ids[-keep:]
