"""Log probabilities in the two shapes that OpenAI's endpoints have; always one entry a token."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from engine.outputs import TokenLogprob
from engine.tokenizer import Tokenizer

#: entries that are written on the event loop; more make others wait
LONG = 256

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


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprob], top: int
) -> list[dict[str, Any] | None]:
    """As vLLM has them: null for the first token, then an object each, from token ids to what is known."""
    return [None, *[_by_id(tokenizer, entry, top) for entry in entries]]


def _by_id(tokenizer: Tokenizer, entry: TokenLogprob, top: int) -> dict[str, Any]:
    best = [(token, logprob, place) for place, (token, logprob) in enumerate(entry.top[:top], 1)]
    listed = [(entry.token_id, entry.logprob, entry.rank), *best]
    return {
        str(token): {
            "logprob": max(logprob, _FLOOR),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token),
        }
        for token, logprob, rank in listed
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

    def __init__(self, tokenizer: Tokenizer, skip: frozenset[int], top: int) -> None:
        """`skip` are the tokens that the text leaves out, `top` how many alternatives are listed."""
        self._tokenizer = tokenizer
        self._skip = skip
        self._top = top
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def echo(self, text: str, ids: Sequence[int], entries: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        """The lists for a prompt, which the client sees as `text`; nothing is known of its first token."""
        lists = self.add([TokenLogprob(ids[0], 0.0), *entries])
        lists["token_logprobs"][0] = lists["top_logprobs"][0] = None
        self._offset += len(self._decoder.decode(b"", final=True))
        # A tokenizer may put a space before a text, which is not in the text itself.
        shift = len(text) - self._offset
        lists["text_offset"] = [max(0, offset + shift) for offset in lists["text_offset"]]
        self._offset = len(text)
        return lists

    def add(self, entries: Iterable[TokenLogprob]) -> dict[str, list[Any]]:
        """The lists for the next tokens."""
        tokens: list[str] = []
        token_logprobs: list[float | None] = []
        top_logprobs: list[dict[str, float] | None] = []
        text_offset: list[int] = []
        for entry in entries:
            token = self._tokenizer.token_text(entry.token_id)
            tokens.append(token)
            token_logprobs.append(max(entry.logprob, _FLOOR))
            # The chosen token is always among them, so there may be one more than was asked for.
            top = {token: max(entry.logprob, _FLOOR)}
            for token_id, logprob in entry.top[: self._top]:
                top.setdefault(self._tokenizer.token_text(token_id), max(logprob, _FLOOR))
            top_logprobs.append(top)
            text_offset.append(self._offset)
            if entry.token_id not in self._skip:
                self._offset += len(self._decoder.decode(_bytes(self._tokenizer, entry.token_id)))
        return {
            "tokens": tokens,
            "token_logprobs": token_logprobs,
            "top_logprobs": top_logprobs,
            "text_offset": text_offset,
        }
