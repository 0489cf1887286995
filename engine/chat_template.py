"""Rendering a model's chat template, which is code from outside, in a sandbox."""

from __future__ import annotations

import copy
import datetime
import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED_CHARS = 8 << 20


class ChatTemplateError(ValueError):
    """The template refused the messages or failed on them; says so in its own words where it has any."""


class _GenerationBlock(Extension):
    """`{% generation %}` marks assistant text for training; for serving its body is rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's protocol

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes <, >, & and ' for HTML, which models were not trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """A compiled chat template; `render` may be called from any thread."""

    def __init__(self, source: str) -> None:
        """Raises ChatTemplateError when `source` is not a valid jinja2 template."""
        self.source = source
        try:
            environment = _environment()
            self._template = environment.from_string(source)
            self._variables = meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template does not compile: {error}") from error

    def reads(self, variable: str) -> bool:
        """Whether the template looks at a variable of this name."""
        return variable in self._variables

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt text for `messages` ({"role", "content", ...} of plain JSON types).

        Fields that are None are left out, as templates take a missing field better than a null one.
        `continue_final_message` ends the prompt inside the last message, right after its text, and
        overrides `add_generation_prompt`. `variables` are visible to the template by name.
        Raises ChatTemplateError, also for a result over MAX_RENDERED_CHARS.
        """
        chat = [{key: value for key, value in message.items() if value is not None} for message in messages]
        mark = ""
        if continue_final_message:
            mark = f"\ue000{secrets.token_hex(8)}\ue000"
            chat = _with_mark(chat, mark)
        text = self._bounded_render(
            {
                **variables,
                "messages": chat,
                "tools": list(tools) if tools else None,
                "add_generation_prompt": add_generation_prompt and not continue_final_message,
            }
        )
        if mark:
            end = text.rfind(mark)
            if end < 0:
                raise ChatTemplateError(
                    "the chat template leaves out the final message, so it can't be continued"
                )
            text = text[:end].replace(mark, "")
        return text

    def _bounded_render(self, variables: Mapping[str, Any]) -> str:
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(variables):
                parts.append(part)
                size += len(part)
                if size > MAX_RENDERED_CHARS:
                    raise ChatTemplateError(f"the rendered chat is over {MAX_RENDERED_CHARS} characters")
        except ChatTemplateError:
            raise
        except Exception as error:  # a template may fail in any way that Python code can
            raise ChatTemplateError(f"the chat template failed: {error or type(error).__name__}") from error
        return "".join(parts)


def _with_mark(chat: list[dict[str, Any]], mark: str) -> list[dict[str, Any]]:
    """A copy of `chat` with `mark` appended to the text of its last message."""
    if not chat:
        raise ChatTemplateError("there is no final message to continue")
    last = copy.deepcopy(chat[-1])
    content = last.get("content")
    if isinstance(content, str):
        last["content"] = content + mark
        return [*chat[:-1], last]
    if isinstance(content, list):
        for part in reversed(content):
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                part["text"] += mark
                return [*chat[:-1], last]
    raise ChatTemplateError("the final message has no text to continue")
