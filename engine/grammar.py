"""Where a text stands in its grammar, and which tokens may come next.

Tokens are judged by their exact bytes. Special tokens belong to a text only where its grammar names them, and
stop tokens are allowed exactly where it may end.

A matcher walks over a tree of places, forwards and, by rolling back, backwards: copying it would cost in
proportion to the text. Drafts branch off the text, and what the drafter has asked about a place is still
known when the target decides there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLMatcher

Encode = Callable[[str], list[int]]


class _Place:
    """Behind one beginning of a text. `allowed`, a bit a token, is known once somebody has asked."""

    __slots__ = ("allowed", "depth", "next", "parent", "token")

    def __init__(self, parent: _Place | None = None, token: int = -1) -> None:
        self.parent = parent
        self.token = token
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.next: dict[int, _Place | None] = {}  # None: no text of the grammar goes on like this
        self.allowed: npt.NDArray[np.uint8] | None = None


class _Walker:
    """One matcher, and the place where it is."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.place = _Place()

    def go(self, place: _Place) -> None:
        """Back to where the ways to both places part, then forwards."""
        here, there, back, forth = self.place, place, 0, []
        while here is not there:
            if here.depth > there.depth:
                assert here.parent is not None
                here, back = here.parent, back + 1
            else:
                assert there.parent is not None
                forth.append(there.token)
                there = there.parent
        if back:
            self.matcher.rollback(back)
        if forth:
            self.matcher.consume_tokens(forth[::-1])
        self.place = place

    def step(self, place: _Place, token: int) -> _Place | None:
        """The place behind `token`, None if that is forbidden."""
        if token not in place.next:
            self.go(place)
            allowed = self.matcher.try_consume_tokens([token]) == 1
            place.next[token] = _Place(place, token) if allowed else None
            self.place = place.next[token] or place
        return place.next[token]

    def forget(self, old: _Place, place: _Place) -> None:
        """Nobody will go back to `old`, nor to what else has followed it than `place`."""
        self.go(place)
        place.parent = None
        old.next.clear()


class GrammarState:
    """One text on its way through a grammar. Belongs to the sequence, like its SamplingState.

    `size`: token ids that the grammar knows of; the bit behind them stands for the end of the text.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        size: int,
        stop_ids: Iterable[int],
        vocab_size: int,
        encode: Encode | None = None,
    ) -> None:
        self._walker = _Walker(matcher)
        self._place: _Place | None = self._walker.place
        self._size = size
        self._stop_ids = sorted(stop_ids)
        self._vocab_size = vocab_size
        self._encode = encode
        self._ahead = False

    def fork(self) -> GrammarState:
        """One that may run ahead over drafts; of no use once this one has gone on."""
        twin = object.__new__(GrammarState)
        twin.__dict__.update(self.__dict__)
        twin._ahead = True
        return twin

    def advance(self, token: int) -> None:
        """The text grew by `token`. After a forbidden one, nothing may follow."""
        old = self._place
        if old is None:
            return
        self._place = self._walker.step(old, token) if token < self._size else None
        if self._place is not None and not self._ahead:
            self._walker.forget(old, self._place)

    def forbidden(self) -> torch.Tensor:
        """bool [V]: tokens that may not come next."""
        bits = np.unpackbits(self.allowed(), count=self._vocab_size, bitorder="little")
        return torch.from_numpy(bits == 0)

    def allowed(self) -> npt.NDArray[np.uint8]:
        """The same the other way round, a bit a token, the lowest first: [V / 8, rounded up]."""
        place = self._place
        if place is None:
            return self._none()
        if place.allowed is None:
            self._walker.go(place)
            place.allowed = self._compute()
        return place.allowed

    def _none(self) -> npt.NDArray[np.uint8]:
        return np.zeros(-(-self._vocab_size // 8), dtype=np.uint8)

    def _compute(self) -> npt.NDArray[np.uint8]:
        matcher, allowed = self._walker.matcher, self._none()
        bits = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        if matcher.is_error():  # too complex to be followed any further
            return allowed
        whole, rest = divmod(min(self._size, self._vocab_size), 8)
        allowed[:whole] = bits[:whole]
        if rest:
            allowed[whole] = bits[whole] & ((1 << rest) - 1)
        may_end = bits[self._size // 8] >> (self._size % 8) & 1
        for token in self._stop_ids:
            byte, bit = token // 8, 1 << (token % 8)
            allowed[byte] = allowed[byte] | bit if may_end else allowed[byte] & (0xFF ^ bit)
        return allowed

    @property
    def ended(self) -> bool:
        """Whether the text is complete and cannot be continued."""
        matcher = self._at_place()
        return matcher is not None and matcher.is_stopped() and not matcher.is_error()

    def legal(self, tokens: Sequence[int]) -> int:
        """How many of these tokens may follow one another from here, none of them a stop token."""
        stop = next((i for i, token in enumerate(tokens) if token in self._stop_ids), len(tokens))
        matcher = self._at_place()
        return 0 if matcher is None else matcher.validate_tokens(list(tokens[:stop]))

    def forced(self) -> list[int]:
        """Tokens of what must come next, as a tokenizer would cut it. Other tokens may spell the same."""
        matcher = self._at_place()
        if matcher is None or self._encode is None:
            return []
        text = matcher.compute_ff_bytes().decode(errors="ignore")
        return self._encode(text)[:-1]  # the last one may be longer: what follows is open

    def _at_place(self) -> LLMatcher | None:
        """The matcher where this text is; None behind a forbidden token."""
        if self._place is None:
            return None
        self._walker.go(self._place)
        return self._walker.matcher


class Grammar:
    """A compiled grammar, from which any number of texts may begin."""

    def __init__(self, matcher: LLMatcher, size: int, encode: Encode | None = None) -> None:
        self._matcher = matcher
        self._size = size
        self._encode = encode

    def begin(self, stop_ids: Iterable[int], vocab_size: int) -> GrammarState:
        """For a new text; `stop_ids` end it, `vocab_size` is the model's."""
        return GrammarState(self._matcher.deep_copy(), self._size, stop_ids, vocab_size, self._encode)
