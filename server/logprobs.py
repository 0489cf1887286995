"""Log probabilities in the two shapes that OpenAI's endpoints have; always one entry a token."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from engine.outputs import TokenLogprob
from engine.tokenizer import Tokenizer

# JSON has no infinity; other servers send this for a token of probability zero.
_FLOOR = -9999.0


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    """{"content": [...]} with exact bytes, since a token may be half a character."""
    return {
        "content": [
            _chat_entry(tokenizer, entry.token_id, entry.logprob)
            | {"top_logprobs": [_chat_entry(tokenizer, token, logprob) for token, logprob in entry.top]}
            for entry in entries
        ]
    }


def _chat_entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": max(logprob, _FLOOR),
        "bytes": list(_bytes(tokenizer, token_id)),
    }


def _bytes(tokenizer: Tokenizer, token_id: int) -> bytes:
    """Nothing for the ids by which a model's output is wider than its vocabulary."""
    known = 0 <= token_id < len(tokenizer.token_bytes)
    return tokenizer.token_bytes[token_id] if known else b""


class CompletionLogprobs:
    """Builds the parallel lists of /v1/completions for one choice, chunk by chunk.

    An offset counts the characters that were complete before the token: tokens that share a character
    share its offset, and the offsets are those of the text that the client sees.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def add(self, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
        """The lists for the next tokens."""
        tokens: list[str] = []
        token_logprobs: list[float] = []
        top_logprobs: list[dict[str, float]] = []
        text_offset: list[int] = []
        for entry in entries:
            token = self._tokenizer.token_text(entry.token_id)
            tokens.append(token)
            token_logprobs.append(max(entry.logprob, _FLOOR))
            # The chosen token is always among them, so there may be one more than was asked for.
            top = {token: max(entry.logprob, _FLOOR)}
            for token_id, logprob in entry.top:
                top.setdefault(self._tokenizer.token_text(token_id), max(logprob, _FLOOR))
            top_logprobs.append(top)
            text_offset.append(self._offset)
            if entry.token_id not in self._tokenizer.special_ids:
                self._offset += len(self._decoder.decode(_bytes(self._tokenizer, entry.token_id)))
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": text_offset,
        }
