"""The grammar of a chat answer: thoughts, if the model has any, then what was asked for, or calls of tools.

Calls are written the way of the model's family, from the first mark of a call to its last: an answer may hold
text without any call, but no call that is not well formed. In Lark, as the grammar library reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from server.structured import Form, json_rule, lark, literal
from server.text_splitter import THINK, THOUGHT
from server.tool_formats import ToolFormat
from server.tools import Function


@dataclass(frozen=True, slots=True)
class Calls:
    """Which functions may be called, in which form; at least one if `required`, several if `parallel`."""

    form: ToolFormat
    functions: Sequence[Function]
    required: bool = False
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class Thoughts:
    """`begun`: the prompt has opened them, so that they must end before anything else."""

    begun: bool


@dataclass(frozen=True, slots=True)
class GrammarSource:
    """A grammar as text, and the field of the request that asked for it.

    `answer` is a grammar of the client's own that the text names, in Lark or GBNF; where it is all that there
    is, the text is empty.
    """

    text: str
    param: str
    answer: str | None = None

    def spelt(self) -> tuple[str, dict[str, str]]:
        """What is to be compiled, and the parts that it names. May take long; raises ApiError."""
        if self.answer is None:
            return self.text, {}
        answer = lark(self.answer)
        return (self.text, {"answer": answer}) if self.text else (answer, {})


def answer_grammar(
    form: Form | None,
    calls: Calls | None = None,
    thoughts: Thoughts | None = None,
    special: Mapping[str, int] | None = None,
) -> GrammarSource | None:
    """None if any text will do.

    `special` are ids of special tokens by their text: where a mark is one, the grammar names the token.
    """
    if form is None and calls is None:
        return None
    param = "tools" if form is None else form.param
    whole = None if form is None else form.grammar
    if whole is not None and calls is None and thoughts is None:
        return GrammarSource("", param, whole)
    special = special or {}
    required = calls is not None and calls.required
    rules, ways = ["TEXT: /(.|\\n)*/"], []
    if form is not None and not required:
        rules.append(f"answer: {form.rule or '@answer'}")
        ways.append("answer")
    bound = bool(ways) or required
    if calls is not None:
        rules += _bound_calls(calls, special) if bound else _free_calls(calls, special)
        ways.append("calls")
    start = " | ".join(ways)
    if thoughts is not None and (bound or (calls is not None and calls.form.bare)):  # else text allows them
        rules += [_upto("thoughts", THOUGHT, special), r"blank: /\n{0,2}/"]
        first = "thoughts blank" if thoughts.begun else f"({_mark(THINK, special)} thoughts blank)?"
        start = f"{first} ({start})"
    return GrammarSource("\n".join([f"start: {start}", *rules]), param, whole)


def _bound_calls(calls: Calls, special: Mapping[str, int]) -> list[str]:
    """Rules for nothing but calls."""
    form, mark = calls.form, _mark(calls.form.opening, special)
    once = f"{mark}? marked" if form.bare else f"{mark} marked"
    between = "" if form.inner else '"\\n" '
    several = f"{once} ({between}{once})*" if calls.parallel and _apart(form) else once
    return [f"calls: {several}", *_marked(calls, special)]


def _free_calls(calls: Calls, special: Mapping[str, int]) -> list[str]:
    """Rules for text with calls in it, or none."""
    form = calls.form
    if form.bare:  # calls are the whole answer, and text begins with nothing that could be one
        mark = _mark(form.opening, special)
        return [f"calls: {mark}? marked | PLAIN?", r"PLAIN: /[^{\s](.|\n)*/", *_marked(calls, special)]
    way = "(ahead marked)* TEXT" if calls.parallel and _apart(form) else "ahead marked | TEXT"
    return [f"calls: {way}", _upto("ahead", form.opening, special), *_marked(calls, special)]


def _apart(form: ToolFormat) -> bool:
    """Whether every call has a mark of its own."""
    return not (form.listed or form.separator)


def _marked(calls: Calls, special: Mapping[str, int]) -> list[str]:
    """Rules for what comes behind the mark."""
    form = calls.form
    if form.listed:
        more = ' (", " call)*' if calls.parallel else ""
        body = f'"[" call{more} "]"'
    elif form.separator:
        body = f'call ("{form.separator} " call)*' if calls.parallel else "call"
    elif form.inner:
        body = "call"
    else:
        body = f'"\\n" call "\\n" {_mark(form.closing, special)}'
    rules = [f"marked: {body}", "call: " + " | ".join(f"call_{i}" for i in range(len(calls.functions)))]
    for i, function in enumerate(calls.functions):
        head, tail = _around(function, form, special)
        rules += [
            f"call_{i}: {head} arguments_{i} {tail}",
            f"arguments_{i}: {json_rule(function.schema_of_arguments, lenient=not function.strict)}",
        ]
    return rules


def _around(function: Function, form: ToolFormat, special: Mapping[str, int]) -> tuple[str, str]:
    """What comes before a call's arguments, and what behind them."""
    if not form.inner:
        return literal(f'{{"name": {json.dumps(function.name)}, "{form.arguments}": '), '"}"'
    own_id = f"({_mark(form.id_mark, special)} /[a-zA-Z0-9]{{9}}/)? " if form.id_mark in special else ""
    return f"{literal(function.name)} {own_id}{_mark(form.inner, special)}", ""


def _mark(mark: str, special: Mapping[str, int]) -> str:
    return f"<[{special[mark]}]>" if mark in special else literal(mark)


def _upto(rule: str, mark: str, special: Mapping[str, int]) -> str:
    """A rule for any text up to the first such mark, and the mark."""
    if mark in special:
        return f"{rule}: TEXT {_mark(mark, special)}"
    return f"{rule}[lazy]: TEXT {literal(mark)}"
