"""Grammars of one vocabulary, compiled once each. Compiling may take long: never on the event loop."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from engine.grammar import Encode, Grammar

_KEPT = 128
_LONGEST = 1 << 18
#: work, not seconds, so that a grammar which compiles here compiles on a busy machine too
_LIMITS = LLParserLimits(
    initial_lexer_fuel=2_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_grammar_size=300_000,
    verbose_errors=False,
)


# All tokens that spell a text, not only the ones that a tokenizer would take.
_BY_BYTES = '%llguidance {"no_forcing": true}'


class GrammarError(ValueError):
    """A grammar does not compile, or is too complex; the message says where."""


class GrammarCompiler:
    """For tokens with these bytes; b"" for an id that says nothing. May be called from any thread.

    `encode` cuts text into tokens the usual way, so that what a grammar forces can be drafted.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        special_ids: frozenset[int],
        encode: Encode | None = None,
    ) -> None:
        self.size = len(token_bytes)
        self._token_bytes = token_bytes
        self._special_ids = special_ids
        self._encode = encode
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, source: str, parts: Mapping[str, str] | None = None) -> Grammar:
        """`source` is Lark, and may name further grammars (`@name`) of `parts`. Raises GrammarError."""
        texts = [{"lark_grammar": f"{source}\n{_BY_BYTES}"}]
        texts += [{"name": name, "lark_grammar": text} for name, text in (parts or {}).items()]
        source = json.dumps({"grammars": texts})
        with self._lock:
            if source in self._kept:
                self._kept.move_to_end(source)
                return self._kept[source]
        if len(source) > _LONGEST:
            raise GrammarError(f"the grammar has {len(source)} characters, more than {_LONGEST}")
        matcher = LLMatcher(self.tokenizer, source, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        grammar = Grammar(matcher, self.size, self._encode)
        with self._lock:
            self._kept[source] = grammar
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return grammar

    @property
    def tokenizer(self) -> LLTokenizer:
        """Made on first use: it takes a moment, and not every server is asked for grammars."""
        with self._lock:
            if self._tokenizer is None:
                tokens = [*self._token_bytes, b"<|end|>"]
                words = _Words(tokens, self._special_ids | {self.size}, self.size)
                self._tokenizer = LLTokenizer(TokenizerWrapper(words), n_vocab=self.size + 1)
            return self._tokenizer


class _Words:
    """A vocabulary as the library wants to see it, with an end-of-text token of our own as the last."""

    def __init__(self, tokens: list[bytes], special_ids: frozenset[int], end: int) -> None:
        self.tokens = tokens
        self.special_token_ids = sorted(special_ids)
        self.eos_token_id = end
        self.bos_token_id = None

    def __call__(self, text: bytes | str) -> list[int]:
        """Tokens of a text, asked for only where tokens are forced, which we never have."""
        return []
