"""Users of everything at once: JSON, tools, penalties, seeds, stops, log probabilities."""

from __future__ import annotations

from typing import Any

from loadtest import User, task
from server.bench_prompts import PROMPTS

SCHEMA = {
    "type": "object",
    "properties": {
        "answer": {"type": "string", "maxLength": 120},
        "certain": {"type": "boolean"},
        "keywords": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 4},
    },
    "required": ["answer", "certain", "keywords"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look something up.",
        "parameters": {
            "type": "object",
            "properties": {"topic": {"type": "string", "maxLength": 40}},
            "required": ["topic"],
        },
    },
}


class Mixed(User):
    """Each task as often as any other."""

    async def ask(self, name: str, **body: Any) -> None:
        body = {"max_tokens": 64, "temperature": 0.8} | body
        await self.chat(self.random.choice(PROMPTS), name=name, **body)

    @task
    async def plain(self) -> None:
        await self.ask("plain")

    @task
    async def schema(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
        await self.ask("schema", response_format=form)

    @task
    async def any_json(self) -> None:
        await self.ask("any json", response_format={"type": "json_object"})

    @task
    async def tools(self) -> None:
        await self.ask("tools", tools=[TOOL], tool_choice=self.random.choice(("auto", "required")))

    @task
    async def penalties(self) -> None:
        await self.ask("penalties", presence_penalty=0.5, frequency_penalty=0.5)

    @task
    async def seeded(self) -> None:
        await self.ask("seeded", seed=self.random.randrange(1 << 30), top_p=0.9)

    @task
    async def stops(self) -> None:
        await self.ask("stops", stop=["\n\n", "Finally"])

    @task
    async def told(self) -> None:
        await self.ask("logprobs", logprobs=True, top_logprobs=5, temperature=0)
