"""Tools for models whose chat template knows none: instructions before the conversation, calls as text.

The model reads how to write a call, and finds earlier calls and their results in the conversation in the same
form. How well it does so is up to the model; that its calls are well formed is up to the grammar.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from server.tool_formats import ToolFormat

_INSTRUCTIONS = """\
You can call functions. Here is what you can call, a JSON object a line:

{tools}

To call one, answer with its name and arguments, and nothing else, like this:
{example}
The result will be given to you. Call a function only if it helps; else answer as usual."""

Turn = dict[str, Any]


def with_tools_as_text(turns: Sequence[Turn], tools: Sequence[Turn], form: ToolFormat) -> list[Turn]:
    """The conversation with `tools` explained before its system message, calls and results as text."""
    told: list[Turn] = []
    results: list[str] = []  # of consecutive turns: templates may insist on turns that alternate
    for turn in turns:
        if turn["role"] == "tool":
            results.append(f"<tool_response>\n{turn['content']}\n</tool_response>")
            if len(results) > 1:
                told.pop()
            told.append({"role": "user", "content": "\n".join(results)})
        else:
            results.clear()
            told.append(_with_calls_as_text(turn, form))
    if not tools:
        return told
    instructions = _INSTRUCTIONS.format(
        tools="\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools),
        example=form.written([("function_name", '{"argument": "value"}')]),
    )
    if told[0]["role"] == "system":
        return [told[0] | {"content": f"{instructions}\n\n{told[0]['content']}"}, *told[1:]]
    return [{"role": "system", "content": instructions}, *told]


def _with_calls_as_text(turn: Turn, form: ToolFormat) -> Turn:
    if not turn.get("tool_calls"):
        return turn
    functions = [call["function"] for call in turn["tool_calls"]]
    calls = [(each["name"], json.dumps(each["arguments"], ensure_ascii=False)) for each in functions]
    content = "\n".join(filter(None, [turn.get("content"), form.written(calls)]))
    return {key: value for key, value in turn.items() if key != "tool_calls"} | {"content": content}
