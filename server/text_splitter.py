"""Splits an answer's text, as it comes, into what was thought, what is said, and calls of tools.

Everything is decided character by character, so it makes no difference how the text was cut into pieces on
its way here. What looks like a call but is none (no JSON object, an unknown name) is part of what is said.
The arguments of a call are passed on as they are read, as far as they are the beginning of a JSON object.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from server.json_scanner import JsonScanner
from server.tool_formats import ToolFormat

THINK, THOUGHT = "<think>", "</think>"
_LONGEST_HEAD = 128  # characters: a name, an id and two marks


@dataclass(slots=True)
class Part:
    """A piece of the answer. A `call`'s text is the tool's name; `arguments` belong to the call before."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str


class TextSplitter:
    """For one answer.

    `thinks`: thoughts may come first, between <think> and </think>; `thinking`: the prompt has opened them.
    `tools` may be called in the way of `calls`. Without any of these everything is said.
    """

    def __init__(
        self,
        calls: ToolFormat | None = None,
        tools: Collection[str] = (),
        thinks: bool = False,
        thinking: bool = False,
    ) -> None:
        self._calls, self._tools = calls, tools
        self._plain = calls is None and not (thinks or thinking)
        self._parts: list[Part] = []
        self._held = ""  # what may become a mark
        self._space = ""  # what is dropped if a mark follows
        self._fresh = thinks or thinking  # blanks that come next are dropped
        self._begun = False  # whether anything was said
        self._raw = ""  # what looks like a call, until it is known to be one
        self._list = False
        self._head = ""  # what stands between the mark of a call and its arguments
        self._call = _Call(tools)
        self._state: Callable[[str], None] = self._say
        if thinking:
            self._state = self._think
        elif thinks:
            self._state = self._open

    def feed(self, text: str) -> list[Part]:
        """The parts that `text` makes certain."""
        if self._plain:
            self._put("content", text)
        else:
            for char in text:
                self._state(char)
        return self._taken()

    def finish(self) -> list[Part]:
        """What was held back, once no more text will come."""
        if self._state == self._think:
            self._put("reasoning", self._space + self._held if self._held else "")
        elif self._state != self._after_call:
            self._put("content", self._raw + self._space + self._held)
        self._raw = self._space = self._held = ""
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _put(self, kind: Literal["content", "reasoning", "call", "arguments"], text: str) -> None:
        if not text and kind != "call":
            return
        if self._parts and self._parts[-1].kind == kind != "call":
            self._parts[-1].text += text
        else:
            self._parts.append(Part(kind, text))

    # ---- thoughts

    def _open(self, char: str) -> None:
        """At the beginning of an answer that may begin with thoughts."""
        self._held += char
        begun = self._held.lstrip()
        if begun == THINK:
            self._held, self._fresh, self._state = "", True, self._think
        elif not THINK.startswith(begun):
            held, self._held, self._fresh, self._state = self._held, "", False, self._say
            for each in held:
                self._state(each)

    def _think(self, char: str) -> None:
        if self._marked(char, THOUGHT, "reasoning"):
            self._space, self._fresh, self._begun, self._state = "", True, False, self._say

    # ---- what is said

    def _say(self, char: str) -> None:
        calls = self._calls
        if calls is None:
            self._emit(char, "content")
        elif calls.bare and char == "{" and not self._begun and not self._held:
            self._begin_call("")
            self._state(char)
        elif self._marked(char, calls.opening, "content"):
            self._begin_call(calls.opening)

    def _marked(self, char: str, mark: str, kind: Literal["content", "reasoning"]) -> bool:
        """Whether `char` completes the mark. All but blanks that may be dropped before it is passed on."""
        self._held += char
        while self._held and not mark.startswith(self._held):
            self._emit(self._held[0], kind)
            self._held = self._held[1:]
        if self._held != mark:
            return False
        self._held = ""
        return True

    def _emit(self, char: str, kind: Literal["content", "reasoning"]) -> None:
        if char.isspace():
            if not self._fresh:
                self._space += char
            return
        self._put(kind, self._space + char)
        self._space, self._fresh, self._begun = "", False, True

    # ---- calls

    def _begin_call(self, mark: str) -> None:
        self._raw, self._space = self._space + mark, ""
        self._list, self._state = False, self._before_call

    def _before_call(self, char: str) -> None:
        self._raw += char
        if char.isspace():
            return
        if char == "[" and not self._list:
            self._list = True
        elif char == "{":
            self._call, self._state = _Call(self._tools), self._in_call
            self._call.feed(char)
        elif self._calls is not None and self._calls.inner and not self._list:
            self._head, self._state = char, self._in_head
        else:
            self._not_a_call()

    def _in_head(self, char: str) -> None:
        """In a name, and perhaps an id, up to the mark before the arguments."""
        assert self._calls is not None
        self._raw += char
        self._head += char
        inner, id_mark = self._calls.inner, self._calls.id_mark
        if self._head.endswith(inner):
            name, mark, own_id = self._head.removesuffix(inner).partition(id_mark)
            if name in self._tools and (own_id.isalnum() or not mark):
                self._call, self._state = _Call(self._tools, name), self._in_call
            else:
                self._not_a_call()
        elif char in " {" or len(self._head) > _LONGEST_HEAD:
            self._not_a_call()

    def _in_call(self, char: str) -> None:
        self._raw += char
        call = self._call
        known = call.name is not None
        ok = call.feed(char)
        if call.name is not None:
            if not known:
                self._put("call", call.name)
            self._raw = ""
            self._put("arguments", call.taken())
        if not ok:
            self._raw = self._raw or char
            self._not_a_call()
        elif call.done:
            self._state = self._after_call

    def _not_a_call(self) -> None:
        """It is said as it stands, or what is left of it."""
        self._put("content", self._raw)
        self._raw, self._fresh, self._begun, self._state = "", False, True, self._say

    def _after_call(self, char: str) -> None:
        assert self._calls is not None
        if char.isspace() and not self._held:
            return
        if self._list and not self._held and char in ",]":
            self._list = char == ","
            if self._list:
                self._state = self._before_call
            return
        if char == self._calls.separator and not self._held:
            self._state = self._before_call
            return
        self._held += char
        closing = self._calls.closing
        if closing and closing.startswith(self._held):
            if self._held == closing:
                self._end_calls("")
            return
        held, self._held = self._held, ""
        self._end_calls(held)

    def _end_calls(self, rest: str) -> None:
        self._held, self._fresh, self._begun, self._state = "", True, True, self._say
        for char in rest:
            self._state(char)


class _Call:
    """One call: its name once that is certain, and its arguments as they come.

    `head`: the name, where it has been read before and the arguments stand alone.
    """

    def __init__(self, tools: Collection[str], head: str | None = None) -> None:
        self._tools, self._head = tools, head
        self._json = JsonScanner()
        self._name = ""
        self._arguments = ""
        self._given = False  # whether there were any
        self.name: str | None = None

    @property
    def done(self) -> bool:
        return self._json.done

    def taken(self) -> str:
        """What has come of the arguments since it was last asked."""
        text, self._arguments = self._arguments, ""
        return text

    def feed(self, char: str) -> bool:
        """Whether this may still be a call."""
        before = self._json.member
        if not self._json.feed(char):
            return False
        if self._head is not None:
            if self.name is not None or char == "{":
                self.name = self._head
                self._arguments += char
            return True
        member = before or self._json.member
        if member in ("arguments", "parameters"):
            if before is None and (char != "{" or self._given):
                return False
            self._given = True
            self._arguments += char
        elif member == "name":
            if before is None and (char != '"' or self._name):
                return False
            self._name += char
            if self._json.member is None and json.loads(self._name) not in self._tools:
                return False
        if self._json.done and not self._given:
            self._arguments, self._given = "{}", True
        # Announced when the arguments begin: until then it may turn out to be something else.
        if self._name and self._given and self._json.member != "name":
            self.name = json.loads(self._name)
        return not self._json.done or self.name is not None
