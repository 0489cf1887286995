"""The input of /v1/responses: a text, or items (messages, thoughts, calls and their outputs), as turns."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from pydantic import ValidationError

from server.protocol import wrong
from server.tools import ToolCall

_ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text")
_THOUGHT_PARTS = ("reasoning_text", "summary_text")

Turn = dict[str, Any]


def turns_of(value: Any) -> list[Turn]:
    """As chat templates want them; for use as a validator."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise wrong("input_type", "Input should be a string or a list of items")
    turns: list[Turn] = []
    for place, item in enumerate(value):
        _add(turns, item, f"Item {place}")
    return turns


def _add(turns: list[Turn], item: Any, place: str) -> None:
    kind = item.get("type", "message") if isinstance(item, dict) else None
    if kind == "message":
        _add_message(turns, item, place)
    elif kind == "reasoning":
        _say(_answer(turns, kind), "reasoning_content", _thoughts(item, place))
    elif kind == "function_call":
        _answer(turns, kind).setdefault("tool_calls", []).append(_call(item, place))
    elif kind == "function_call_output":
        call, output = item.get("call_id"), _text(item.get("output"), _TEXT_PARTS, place)
        if not isinstance(call, str):
            raise wrong("input_call", f"{place} should have the call_id of the call that it answers")
        turns.append({"role": "tool", "tool_call_id": call, "content": output})
    else:
        kinds = "a message, reasoning, a function_call or a function_call_output"
        raise wrong("input_item", f"{place} should be {kinds}: nothing else is supported")


def _add_message(turns: list[Turn], item: Turn, place: str) -> None:
    role, text = item.get("role"), _text(item.get("content"), _TEXT_PARTS, place)
    if role not in _ROLES:
        raise wrong("input_role", f"{place} should have one of the roles {', '.join(_ROLES)}")
    if role == "assistant":
        _say(_answer(turns, "message"), "content", text)
    else:
        turns.append({"role": "system" if role == "developer" else role, "content": text})


def _answer(turns: list[Turn], kind: str) -> Turn:
    """The assistant's turn that an item of this kind belongs to: the last one, if it may still come in it.

    A turn is thoughts, then text and calls. A second message is a second turn, unless calls without outputs
    stand before it.
    """
    last = turns[-1] if turns else {}
    said, called = bool(last.get("content")), bool(last.get("tool_calls"))
    fits = {"reasoning": not (said or called), "message": called or not said, "function_call": True}
    if last.get("role") != "assistant" or not fits[kind]:
        turns.append({"role": "assistant", "content": ""})
    return turns[-1]


def _say(turn: Turn, key: str, text: str) -> None:
    if text:
        turn[key] = f"{turn[key]}\n{text}" if turn.get(key) else text


def _call(item: Turn, place: str) -> dict[str, Any]:
    function = {"name": item.get("name"), "arguments": item.get("arguments")}
    try:
        return ToolCall.model_validate({"id": item.get("call_id"), "function": function}).for_template()
    except ValidationError:
        told = "a call_id, a name, and as its arguments a JSON object as text"
        raise wrong("input_call", f"{place} should have {told}") from None


def _thoughts(item: Turn, place: str) -> str:
    if item.get("encrypted_content") is not None:
        raise wrong("input_encrypted", f"{place} holds encrypted_content, which only its maker can read")
    parts = item.get("content") or item.get("summary")
    return _text(parts, _THOUGHT_PARTS, place) if parts else ""


def _text(content: Any, kinds: Container[Any], place: str) -> str:
    """The text of what is one, or a list of parts of these kinds."""
    if isinstance(content, list) and content:
        return "\n".join(_part(part, kinds, place) for part in content)
    if not isinstance(content, str):
        raise wrong("input_content", f"{place} should have a text or a list of text parts as its content")
    return content


def _part(part: Any, kinds: Container[Any], place: str) -> str:
    if not isinstance(part, dict) or part.get("type") not in kinds or type(part.get("text")) is not str:
        raise wrong("input_part", f"{place} should have text parts only: nothing else is supported")
    text: str = part["text"]
    return text
