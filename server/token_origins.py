"""How each token of a chunk came about: drafted and accepted, or the target's own word after the drafts."""

from __future__ import annotations

from typing import Any, Literal

from engine.outputs import OutputDelta, Round
from engine.tokenizer import Tokenizer

#: draft: proposed and accepted; correction: in the place of a draft that was rejected; bonus: after drafts
#: that were all accepted; plain: no draft was verified
Origin = Literal["draft", "correction", "bonus", "plain"]


def origin(place: int, made: Round) -> Origin:
    """Of the token at `place` among those of one step."""
    if place < made.accepted:
        return "draft"
    if made.verified == 0:
        return "plain"
    return "correction" if made.accepted < made.verified else "bonus"


def speculation_json(tokenizer: Tokenizer, delta: OutputDelta) -> dict[str, Any]:
    """A choice's `speculation`, for stream_options.include_speculation: the steps that made its tokens.

    The bytes of a choice's tokens, one after another, are its text (a token may be half a character);
    special tokens have none. Where a stop string ends the text, the last tokens may reach beyond it.
    """
    tokens = iter(delta.token_ids)
    steps = []
    for made in delta.rounds:
        told = [
            {
                "token": tokenizer.token_text(token),
                "bytes": _bytes(tokenizer, token),
                "origin": origin(place, made),
            }
            for place, token in zip(range(made.tokens), tokens, strict=False)
        ]
        steps.append({"verified": made.verified, "accepted": made.accepted, "tokens": told})
    return {"steps": steps}


def _bytes(tokenizer: Tokenizer, token: int) -> list[int]:
    spoken = token < len(tokenizer.token_bytes) and token not in tokenizer.special_ids
    return list(tokenizer.token_bytes[token]) if spoken else []
