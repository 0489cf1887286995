"""Follows a JSON text one character at a time, so that it does not matter how the text is cut into pieces."""

from __future__ import annotations

import json
import re

_SPACE = " \t\n\r"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"t": "true", "f": "false", "n": "null"}


class JsonScanner:
    """Reads one JSON object. `done` after its last character.

    `member` is the name of the top-level member whose value is being read, None between values.
    """

    def __init__(self) -> None:
        self.done = False
        self.member: str | None = None
        self._open: list[str] = []  # brackets that are open
        self._expect = "object"
        self._token = ""  # of a string, number or word, as far as it has been read
        self._escape = 0  # characters of an escape that are still to come
        self._key = ""  # the last one of the top level

    def feed(self, char: str) -> bool:
        """Whether the text may go on with `char`. Ask no more once it may not."""
        if self._expect in ("string", "key"):
            return self._in_string(char)
        if self._expect in ("number", "word"):
            return self._in_atom(char)
        if char in _SPACE:
            return True
        if self._expect == "object":
            return char == "{" and self._value(char)
        if self._expect == "colon":
            self._expect = "value"
            return char == ":"
        if self._expect == "next":
            return self._next(char)
        if self._expect in ("first key", "more keys"):
            if char == "}" and self._expect == "first key":
                return self._close()
            self._expect, self._token = "key", char
            return char == '"'
        if self._expect == "first value" and char == "]":
            return self._close()
        return self._value(char)

    def _value(self, char: str) -> bool:
        """The first character of a value."""
        if len(self._open) == 1 and self._open[0] == "{":
            self.member = self._key
        self._token = char
        if char == "{":
            self._open.append("{")
            self._expect = "first key"
        elif char == "[":
            self._open.append("[")
            self._expect = "first value"
        elif char == '"':
            self._expect = "string"
        elif char in _WORDS:
            self._expect = "word"
        else:
            self._expect = "number"
            return char in "-0123456789"
        return True

    def _in_string(self, char: str) -> bool:
        if self._escape:
            if self._escape == 1 and self._token[-1] == "\\":
                self._escape = 4 if char == "u" else 0
                ok = char in '"\\/bfnrtu'
            else:
                self._escape -= 1
                ok = char in "0123456789abcdefABCDEF"
            self._token += char
            return ok
        self._token += char
        if char == "\\":
            self._escape = 1
        elif char == '"':
            if self._expect == "key":
                self._expect = "colon"
                if len(self._open) == 1:
                    self._key = json.loads(self._token)
            else:
                self._ended()
        return char >= " "

    def _in_atom(self, char: str) -> bool:
        if self._expect == "word":
            word = _WORDS[self._token[0]]
            self._token += char
            if self._token == word:
                self._ended()
            return word.startswith(self._token)
        if char in "+-.eE0123456789":
            self._token += char
            return True
        ok = _NUMBER.fullmatch(self._token) is not None
        self._ended()
        return ok and (char in _SPACE or self._next(char))

    def _next(self, char: str) -> bool:
        """What may follow a value: a comma, or the end of what it is in."""
        if char == ",":
            self._expect = "more keys" if self._open[-1] == "{" else "value"
            return True
        return char == ("}" if self._open[-1] == "{" else "]") and self._close()

    def _close(self) -> bool:
        self._open.pop()
        self._ended()
        return True

    def _ended(self) -> None:
        """A value is complete."""
        self._expect = "next"
        if len(self._open) <= 1:
            self.member = None
        self.done = not self._open
