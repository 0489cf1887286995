"""The exact bytes that each token id contributes to the text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_OUTSIDE = 0x2603  # any character beyond latin-1: makes encoding fail for a token outside the byte alphabet


def _byte_alphabet() -> dict[int, int]:
    """str.translate table of GPT-2's byte alphabet to latin-1.

    Bytes that are printable in latin-1 stand for themselves, the others, in order, for U+0100 and up.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(0x100) if byte not in printable]
    table = dict.fromkeys(others, _OUTSIDE)
    table.update({0x100 + i: byte for i, byte in enumerate(others)})
    return table


_ALPHABET = _byte_alphabet()


def _from_byte_level(token: str) -> bytes:
    try:
        return token.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()  # an added token, written as it reads


def _from_sentence_piece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def _decoder_kinds(tokenizer: Tokenizer) -> set[str]:
    """The types in the tokenizer's decoder, nested ones included."""
    if tokenizer.decoder is None:
        return set()
    found: set[str] = set()
    todo: list[Any] = [json.loads(tokenizer.decoder.__getstate__())]
    while todo:
        node = todo.pop()
        found.add(node.get("type", ""))
        todo.extend(node.get("decoders", ()))
    return found


def token_bytes(tokenizer: Tokenizer, special_ids: frozenset[int]) -> list[bytes]:
    """One entry per id from 0 to the largest; b"" for ids that no token has.

    Byte-level and SentencePiece vocabularies are read off the token itself, so that a part of a character
    is exact; of any other kind the decoded text of the single token is taken. Special tokens keep the bytes
    of their literal text.
    """
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    kinds = _decoder_kinds(tokenizer)
    spell: Callable[[str], bytes] | None = None
    if "ByteLevel" in kinds:
        spell = _from_byte_level
    elif kinds & {"ByteFallback", "Metaspace"}:
        spell = _from_sentence_piece
    result = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, i in vocabulary.items():
        if i in special_ids:
            result[i] = token.encode()
        elif spell is not None:
            result[i] = spell(token)
        else:
            result[i] = tokenizer.decode([i], skip_special_tokens=False).encode()
    return result
