"""The output of a response, item after item in the order of the text: thoughts, messages, calls of tools.

Whole replies and streams come from the same place: a stream sends the events, a whole reply the items.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from server.text_splitter import Part, TextSplitter
from server.tool_formats import ToolFormat

#: a type without its "response." in front, and the fields that come with it
Event = tuple[str, dict[str, Any]]
Logprobs = Sequence[dict[str, Any]]
Status = Literal["in_progress", "completed", "incomplete"]


class _Item(Protocol):
    """One that is being written. `place` is its index in the output."""

    def opened(self) -> list[Event]:
        """What comes behind the announcement of the item."""

    def added(self, text: str, logprobs: Logprobs) -> Event:
        """A piece of it."""

    def closed(self) -> list[Event]:
        """What comes before its end."""

    def json(self, status: Status) -> dict[str, Any]:
        """The item as far as it has come."""


class _Spoken:
    """A message, or thoughts: an item with one part, which is a text."""

    def __init__(self, name: str, place: int, thoughts: bool) -> None:
        self._id = f"{'rs' if thoughts else 'msg'}_{name}_{place}"
        self._thoughts = thoughts
        self._kind = "reasoning_text" if thoughts else "output_text"
        self._at = {"item_id": self._id, "output_index": place, "content_index": 0}
        self._begun = False
        self._text = ""
        self._logprobs: list[dict[str, Any]] = []

    def opened(self) -> list[Event]:
        part = self._part()
        self._begun = True
        return [("content_part.added", self._at | {"part": part})]

    def added(self, text: str, logprobs: Logprobs) -> Event:
        self._text += text
        self._logprobs += logprobs
        return f"{self._kind}.delta", self._at | {"delta": text} | self._with(logprobs)

    def closed(self) -> list[Event]:
        done = self._at | {"text": self._text} | self._with(self._logprobs)
        return [(f"{self._kind}.done", done), ("content_part.done", self._at | {"part": self._part()})]

    def json(self, status: Status) -> dict[str, Any]:
        content = [self._part()] if self._begun else []
        if self._thoughts:
            own: dict[str, Any] = {"type": "reasoning", "summary": []}
        else:
            own = {"type": "message", "role": "assistant"}
        return {"id": self._id} | own | {"status": status, "content": content}

    def _part(self) -> dict[str, Any]:
        own: dict[str, Any] = {} if self._thoughts else {"annotations": []}
        return {"type": self._kind, "text": self._text} | own | self._with(self._logprobs)

    def _with(self, logprobs: Logprobs) -> dict[str, Any]:
        return {} if self._thoughts else {"logprobs": list(logprobs)}


class _Called:
    """A call of the function `function`."""

    def __init__(self, name: str, place: int, function: str, call_id: str) -> None:
        self._id = f"fc_{name}_{place}"
        self._at = {"item_id": self._id, "output_index": place}
        self._function, self._call_id = function, call_id
        self._arguments = ""

    def opened(self) -> list[Event]:
        return []

    def added(self, text: str, logprobs: Logprobs) -> Event:
        self._arguments += text
        return "function_call_arguments.delta", self._at | {"delta": text}

    def closed(self) -> list[Event]:
        done = self._at | {"name": self._function, "arguments": self._arguments}
        return [("function_call_arguments.done", done)]

    def json(self, status: Status) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "function_call",
            "call_id": self._call_id,
            "name": self._function,
            "arguments": self._arguments,
            "status": status,
        }


class OutputItems:
    """All items of one response, whose text is read by `splitter`; ids of items are made from `name`."""

    def __init__(self, name: str, splitter: TextSplitter, calls: ToolFormat | None) -> None:
        self._name = name
        self._splitter = splitter
        self._calls = calls
        self._open: _Item | None = None
        self._kind = ""  # of the open one
        self.done: list[dict[str, Any]] = []

    def add(self, text: str, logprobs: Logprobs) -> list[Event]:
        """What `text` adds. Logprobs are for answers that are nothing but a message."""
        parts = self._splitter.feed(text)
        if logprobs and not parts:  # a token that is no whole character yet
            parts = [Part("content", "")]
        return self._written(parts, logprobs)

    def end(self, status: Status) -> list[Event]:
        """What was held back, and the end of the last item; there is at least one."""
        events = self._written(self._splitter.finish(), ())
        if self._open is None:
            events += self._begin(Part("content", ""))
        return events + self._end(status)

    def _written(self, parts: Sequence[Part], logprobs: Logprobs) -> list[Event]:
        events: list[Event] = []
        for part in parts:
            goes_on = self._kind == ("call" if part.kind == "arguments" else part.kind)
            if part.kind == "call" or not goes_on:
                events += self._end("completed") + self._begin(part)
            if part.kind != "call":
                assert self._open is not None
                events.append(self._open.added(part.text, logprobs))
        return events

    def _begin(self, part: Part) -> list[Event]:
        place = len(self.done)
        if part.kind == "call":
            assert self._calls is not None
            self._open = _Called(self._name, place, part.text, self._calls.new_id())
        else:
            self._open = _Spoken(self._name, place, part.kind == "reasoning")
        self._kind = part.kind
        item = self._open.json("in_progress")
        return [("output_item.added", {"output_index": place, "item": item}), *self._open.opened()]

    def _end(self, status: Status) -> list[Event]:
        if self._open is None:
            return []
        events = self._open.closed()
        item = self._open.json(status)
        events.append(("output_item.done", {"output_index": len(self.done), "item": item}))
        self.done.append(item)
        self._open = None
        return events
