"""Tokens to text as they arrive: bytes to characters, and stop strings that may span tokens."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """Turns one choice's tokens into pieces of text.

    Each token contributes exact bytes, decoded incrementally: half a character waits for its other half.
    Text that could still become a stop string is held back, and only that (the longest suffix that is a
    proper prefix of a stop string). The text ends before the first stop string to be complete, or behind it
    if it is to be `include`d. The text of the first `free` tokens stops nothing.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        skip: frozenset[int] = frozenset(),
        stop: tuple[str, ...] = (),
        include: bool = False,
        free: int = 0,
    ) -> None:
        self._bytes = token_bytes
        self._skip = skip
        self._stop = stop
        self._include = include
        self._free = free
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.stopped_by: str | None = None

    def push(self, token: int) -> str:
        """The text that `token` makes certain. Sets `stopped_by` when it completes a stop string."""
        free = self._free > 0
        self._free -= free
        if token in self._skip:
            return ""
        text = self._decoder.decode(self._bytes[token])
        return text if free else self._release(text)

    def finish(self) -> str:
        """What was still held back, once no more tokens will come."""
        if self.stopped_by is not None:
            return ""
        tail = self._release(self._decoder.decode(b"", final=True))
        if self.stopped_by is None:
            tail, self._held = tail + self._held, ""
        return tail

    def _release(self, text: str) -> str:
        if not self._stop:
            return text
        self._held += text
        # The first to be complete, so that it does not matter how the text is cut into tokens.
        found = [(at + len(stop), at, stop) for stop in self._stop if (at := self._held.find(stop)) >= 0]
        if found:
            end, at, self.stopped_by = min(found)
            text, self._held = self._held[: end if self._include else at], ""
            return text
        keep = max(_overlap(self._held, stop) for stop in self._stop)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
