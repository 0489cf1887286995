"""How families of models write tool calls, and how to recognise a family by its chat template."""

from __future__ import annotations

import json
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
    `inner`, if there is one: a call is its name, this mark, and the arguments alone as JSON; behind the name
    may be the mark `id_mark` and an id of the model's own, which nobody needs.
    """

    name: str
    opening: str
    closing: str = ""
    arguments: str = "arguments"
    listed: bool = False
    separator: str = ""
    bare: bool = False
    inner: str = ""
    id_mark: str = ""
    id_prefix: str = "call_"
    id_length: int = 24

    @property
    def marks(self) -> list[str]:
        """All that a tokenizer may have special tokens for."""
        return [mark for mark in (self.opening, self.closing, self.inner, self.id_mark) if mark]

    def new_id(self) -> str:
        """An id for a call."""
        return self.id_prefix + "".join(secrets.choice(_ID_CHARACTERS) for _ in range(self.id_length))

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """How calls, names with arguments as JSON text, stand in an answer."""
        if self.inner:
            return "".join(f"{self.opening}{name}{self.inner}{arguments}" for name, arguments in calls)
        objects = [
            f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{self.arguments}": {arguments}}}'
            for name, arguments in calls
        ]
        if self.listed:
            return f"{self.opening}[{', '.join(objects)}]"
        if self.separator:
            return f"{self.separator} ".join(objects)
        return "\n".join(f"{self.opening}\n{call}\n{self.closing}" for call in objects)


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
LLAMA3 = ToolFormat("llama3_json", "<|python_tag|>", arguments="parameters", separator=";", bare=True)
# Mistral's templates refuse ids of any other form.
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", listed=True, id_prefix="", id_length=9)
MISTRAL_ARGS = ToolFormat(
    "mistral_args", "[TOOL_CALLS]", inner="[ARGS]", id_mark="[CALL_ID]", id_prefix="", id_length=9
)

FORMATS = {each.name: each for each in (HERMES, LLAMA3, MISTRAL_ARGS, MISTRAL)}


def recognise(template: str) -> ToolFormat | None:
    """The family whose marks a template holds; None if it holds none that we know."""
    fitting = (each for each in FORMATS.values() if each.opening in template and each.inner in template)
    return next(fitting, None)
