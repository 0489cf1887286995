"""Users of a plain chat: what `deploy.bench.mixed` compares with."""

from __future__ import annotations

from loadtest import User, task
from server.bench_prompts import PROMPTS


class Plain(User):
    """Asks one thing after another."""

    @task
    async def plain(self) -> None:
        await self.chat(self.random.choice(PROMPTS), max_tokens=64, temperature=0.8)
