"""What a chat answer is made of: how its prompt shows tools, its grammar, and how its text is split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.tokenizer import Tokenizer
from server.answer_grammar import Calls, GrammarSource, Thoughts, answer_grammar
from server.errors import invalid
from server.settings import Settings
from server.structured import Form
from server.text_splitter import THINK, THOUGHT, TextSplitter
from server.tool_formats import FORMATS, HERMES, ToolFormat, recognise
from server.tool_prompt import with_tools_as_text
from server.tools import ToolUse

_TAIL = 16  # tokens of a prompt that show whether it has opened the model's thoughts


@dataclass(frozen=True, slots=True)
class AnswerWays:
    """What is known of a model: how it writes calls (None: nobody knows), and whether it thinks first.

    `native`: its template shows it the tools; if not, we do. `special`: ids of special tokens by their text.
    """

    calls: ToolFormat | None
    native: bool
    thinks: bool
    special: Mapping[str, int]

    @classmethod
    def of(cls, tokenizer: Tokenizer, settings: Settings) -> AnswerWays:
        """As the settings say, else as the chat template shows."""
        template = tokenizer.chat_template(tools=True)
        native = template is not None and template.reads("tools")
        source = template.source if template is not None else ""
        if settings.tool_call_parser != "auto":
            calls: ToolFormat | None = FORMATS[settings.tool_call_parser]
        else:
            calls = recognise(source) if native else HERMES
        thinks = (
            THINK in source if settings.reasoning_parser == "auto" else settings.reasoning_parser == "think"
        )
        special = {tokenizer.token_text(i): i for i in tokenizer.special_ids}
        return cls(calls, native, thinks, special)

    def plan(self, turns: Sequence[dict[str, Any]], use: ToolUse, form: Form | None) -> AnswerPlan:
        """Raises ApiError for tools that cannot be called as asked."""
        calls = self._calls(use)
        shown = [] if calls is None else [each.for_template() for each in use.functions]
        if not self.native and self.calls is not None:
            turns, shown = with_tools_as_text(turns, shown, self.calls), []
        return AnswerPlan(self, turns, shown, calls, form)

    def _calls(self, use: ToolUse) -> Calls | None:
        if not use.functions:
            if use.choice == "required":
                raise invalid("tool_choice needs tools.", "tool_choice")
            return None
        names = [each.name for each in use.functions]
        if len(set(names)) < len(names):
            raise invalid("Two tools have the same name.", "tools")
        if use.choice == "none":
            return None
        if self.calls is None:
            raise invalid(
                "How this model writes tool calls is not known: serve it with --tool-call-parser.",
                "tools",
                "unsupported_parameter",
            )
        functions = [each for each in use.functions if use.named in (None, each.name)]
        if not functions:
            raise invalid(f"There is no tool {use.named!r}.", "tool_choice")
        return Calls(self.calls, functions, use.choice == "required", use.parallel and use.named is None)


@dataclass(frozen=True, slots=True)
class AnswerPlan:
    """One request's: `turns` and `tools` go to the chat template."""

    ways: AnswerWays
    turns: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]]
    calls: Calls | None
    form: Form | None

    def thoughts(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> Thoughts | None:
        """Whether thoughts may come first, and whether the prompt has opened them; None if it closed them."""
        if not self.ways.thinks:
            return None
        tail = tokenizer.decode(prompt[-_TAIL:], skip_special_tokens=False).rstrip()
        return None if tail.endswith(THOUGHT) else Thoughts(begun=tail.endswith(THINK))

    def grammar(self, thoughts: Thoughts | None) -> GrammarSource | None:
        """What the answer keeps to."""
        return answer_grammar(self.form, self.calls, thoughts, self.ways.special)

    def splitter(self, thoughts: Thoughts | None) -> TextSplitter:
        """For one choice."""
        form = None if self.calls is None else self.calls.form
        names = [] if self.calls is None else [each.name for each in self.calls.functions]
        return TextSplitter(form, names, thoughts is not None, thoughts is not None and thoughts.begun)

    def spoken_ids(self, thoughts: Thoughts | None) -> frozenset[int]:
        """Special tokens that the splitter has to see in the text."""
        marks = [] if thoughts is None else [THINK, THOUGHT]
        if self.calls is not None:
            marks += self.calls.form.marks
        return frozenset(self.ways.special[mark] for mark in marks if mark in self.ways.special)
