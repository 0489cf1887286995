"""A conversation made ready for the engine, the same way for every endpoint that answers one."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.async_engine import AsyncEngine
from engine.params import SamplingParams
from engine.request import Request
from server.answer_grammar import Thoughts
from server.answer_plan import AnswerPlan
from server.context import ServerContext
from server.generation import with_bad_words
from server.protocol import GenerationRequest
from server.text_splitter import TextSplitter
from server.tool_formats import ToolFormat


@dataclass(frozen=True, slots=True)
class Conversation:
    """What the engine is asked, and how what it answers is to be read."""

    request: Request
    plan: AnswerPlan
    thoughts: Thoughts | None

    @property
    def plain(self) -> bool:
        """Whether the answer is nothing but text."""
        return self.calls is None and self.thoughts is None

    @property
    def calls(self) -> ToolFormat | None:
        """How tools are called; None if there are none to call."""
        return None if self.plan.calls is None else self.plan.calls.form

    def splitter(self) -> TextSplitter:
        """For the text of one choice."""
        return self.plan.splitter(self.thoughts)


async def prepared(
    context: ServerContext,
    engine: AsyncEngine,
    wanted: GenerationRequest,
    params: SamplingParams,
    plan: AnswerPlan,
    variables: Mapping[str, Any],
    param: str,
) -> Conversation:
    """Render the prompt, compile the grammar. `variables` are the template's; errors name `param`."""
    keep = context.encoder.kept(wanted.truncate_prompt_tokens, params.max_tokens)
    told = dict(variables) | ({"tools": plan.tools} if plan.tools else {})
    prompt = await context.off_loop(context.encoder.render, plan.turns, told, keep, param)
    thoughts = plan.thoughts(engine.tokenizer, prompt)
    request = Request(
        request_id=uuid.uuid4().hex,
        prompt_token_ids=prompt,
        params=await with_bad_words(context, wanted, params),
        cache_salt=wanted.cache_salt or "",
        speculative_tokens=wanted.num_speculative_tokens,
        priority=wanted.priority or 0,
        grammar=await context.compiled(plan.grammar(thoughts)),
        spoken_ids=plan.spoken_ids(thoughts),
    )
    return Conversation(request, plan, thoughts)
