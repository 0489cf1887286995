"""Tools, as requests bring them: definitions, which of them to call, calls and their results in messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from server.strict import Strict

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
ToolChoice = Literal["none", "auto", "required"]


class Function(Strict):
    """What can be called. Calls keep to `parameters`, a JSON schema, whether it is `strict` or not."""

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        if self.parameters:
            return {"type": "object"} | self.parameters
        return {"type": "object", "properties": {}, "additionalProperties": False}

    def for_template(self) -> dict[str, Any]:
        """As chat templates want it, and OpenAI's chat endpoint."""
        return {"type": "function", "function": self.model_dump(exclude_none=True)}


class Tool(Strict):
    """A tool of the only type there is."""

    type: Literal["function"]
    function: Function


class _NamedFunction(Strict):
    name: Name


class NamedTool(Strict):
    """A tool that must be called."""

    type: Literal["function"]
    function: _NamedFunction


class FlatNamedTool(Strict):
    """The same as /v1/responses has it."""

    type: Literal["function"]
    name: Name


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What may be called and how: `named` is the function that must be, `parallel` allows several calls."""

    functions: Sequence[Function]
    choice: ToolChoice = "auto"
    named: str | None = None
    parallel: bool = True


def _json_object(text: str) -> str:
    """Refuse arguments that no template could write."""
    try:
        ok = isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        ok = False
    if not ok:
        raise PydanticCustomError("tool_arguments", "Arguments should be a JSON object as text")
    return text


class CalledFunction(Strict):
    """`arguments` is a JSON object as text."""

    name: str
    arguments: Annotated[str, AfterValidator(_json_object)]


class ToolCall(Strict):
    """A call that the assistant made in an earlier turn."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """As chat templates want it: with arguments that are no text any more."""
        function = {"name": self.function.name, "arguments": json.loads(self.function.arguments or "{}")}
        return {"id": self.id, "type": self.type, "function": function}
