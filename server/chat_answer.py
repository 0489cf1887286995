"""One choice of a chat reply, as the deltas of a message and as the whole of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.text_splitter import Part, TextSplitter
from server.tool_formats import ToolFormat


class ChatAnswer:
    """Takes the choice's text as it comes. `calls` is the form of its calls, if there can be any."""

    def __init__(self, splitter: TextSplitter, calls: ToolFormat | None = None) -> None:
        self._splitter = splitter
        self._calls = calls
        self._called = 0

    def delta(self, text: str, last: bool = False) -> dict[str, Any]:
        """What `text` adds to the message, perhaps nothing; if it is the `last`, also what was held back."""
        parts = self._splitter.feed(text)
        return self._written(parts + self._splitter.finish() if last else parts)

    def finish_reason(self, reason: str | None) -> str | None:
        """In OpenAI's words: an answer that ends by itself and calls tools does so in order to call them."""
        return "tool_calls" if reason == "stop" and self._called else reason

    def message(self, text: str) -> dict[str, Any]:
        """The whole message at once."""
        delta = self.delta(text, last=True)
        message = {"role": "assistant", "content": "", "refusal": None} | delta
        if calls := delta.get("tool_calls"):
            message["content"] = message["content"] or None
            message["tool_calls"] = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
        return message

    def _written(self, parts: Sequence[Part]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        for part in parts:
            if part.kind == "call":
                calls.append(self._begun(part.text))
            elif part.kind == "arguments":
                if not calls:  # of the call that an earlier delta has begun
                    calls.append({"index": self._called - 1, "function": {"arguments": ""}})
                calls[-1]["function"]["arguments"] += part.text
            else:
                key = "content" if part.kind == "content" else "reasoning_content"
                delta[key] = delta.get(key, "") + part.text
        return delta | {"tool_calls": calls} if calls else delta

    def _begun(self, name: str) -> dict[str, Any]:
        assert self._calls is not None
        self._called += 1
        function = {"name": name, "arguments": ""}
        return {
            "index": self._called - 1,
            "id": self._calls.new_id(),
            "type": "function",
            "function": function,
        }
