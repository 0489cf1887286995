"""How families of models write tool calls, and how to recognise a family by its chat template."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass

_ID_CHARACTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Calls are JSON objects {"name": ..., `arguments`: {...}} within marks.

    `opening` announces them and `closing` (perhaps nothing) follows; in between is one call, or several as a
    JSON list (`listed`) or with `separator` between them. `bare`: an answer that begins with a brace is a
    call without any announcement.
    """

    name: str
    opening: str
    closing: str = ""
    arguments: str = "arguments"
    listed: bool = False
    separator: str = ""
    bare: bool = False
    id_prefix: str = "call_"
    id_length: int = 24

    def new_id(self) -> str:
        """An id for a call."""
        return self.id_prefix + "".join(secrets.choice(_ID_CHARACTERS) for _ in range(self.id_length))

    def written(self, calls: Sequence[str]) -> str:
        """How calls, JSON objects as text, stand in an answer."""
        if self.listed:
            return f"{self.opening}[{', '.join(calls)}]"
        if self.separator:
            return f"{self.separator} ".join(calls)
        return "\n".join(f"{self.opening}\n{call}\n{self.closing}" for call in calls)


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
LLAMA3 = ToolFormat("llama3_json", "<|python_tag|>", arguments="parameters", separator=";", bare=True)
# Mistral's templates refuse ids of any other form.
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", listed=True, id_prefix="", id_length=9)

FORMATS = {each.name: each for each in (HERMES, LLAMA3, MISTRAL)}


def recognise(template: str) -> ToolFormat | None:
    """The family whose marks a template holds; None if it holds none that we know."""
    return next((each for each in FORMATS.values() if each.opening in template), None)
