"""The users that flags describe: sessions of one or more turns, over prompts, lengths and sampling."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from loadtest.arrivals import Timed
from loadtest.lengths import Lengths
from loadtest.prompts import Prompt, PromptMix, block_text, words
from loadtest.scenario import Messages, Sender, User, between, task

_USUAL = Lengths("fixed", 64)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked. With `prompts` they are drawn from there, otherwise made of words."""

    endpoint: Literal["chat", "completions"] = "chat"
    prompts: tuple[Prompt, ...] = ()
    #: weight by domain; empty takes all alike
    weights: Mapping[str, float] = field(default_factory=dict)
    input_tokens: Lengths = _USUAL
    output_tokens: Lengths = _USUAL
    ignore_eos: bool = False
    turns: int = 1
    system: str | None = None
    #: system prompts of words, each shared by the sessions that happen to draw it
    shared_prefixes: int = 0
    prefix_tokens: int = 256
    #: further fields of every body
    body: Mapping[str, Any] = field(default_factory=dict)
    #: give every request a seed of its own
    seeded: bool = False
    cancel_share: float = 0.0
    think: tuple[float, float] = (0.0, 0.0)
    #: how prompts differ from those of other runs, so that no cache helps: not at all, or by a first line
    opening: str | None = None


class Sessions:
    """Draws sessions. Session i is the same whenever and by whomever it is begun."""

    def __init__(self, workload: Workload, seed: str) -> None:
        self.workload = workload
        self._seed = seed
        self._numbers = itertools.count()
        rng = random.Random(f"{seed} mix")
        self._mix = PromptMix(workload.prompts, workload.weights, rng) if workload.prompts else None
        self._prefixes = [
            words(workload.prefix_tokens, random.Random(f"prefix {place}"))
            for place in range(workload.shared_prefixes)
        ]

    def rng(self) -> random.Random:
        """The random stream of the next session."""
        return random.Random(f"{self._seed} {next(self._numbers)}")

    def prompt(self, rng: random.Random, timed: Timed | None) -> Prompt:
        """What the session asks, at least as many turns as wanted."""
        if timed is not None:
            if timed.prompt is not None:
                return Prompt("trace", (timed.prompt,))
            blocks = " ".join(block_text(block) for block in timed.blocks).split()[: timed.input_tokens]
            fill = words((timed.input_tokens or 1) - len(blocks), rng)
            return Prompt("trace", (" ".join([*blocks, fill]).strip(),))
        if self._mix is None:
            draw = self.workload.input_tokens.draw
            return Prompt("words", tuple(words(draw(rng), rng) for _ in range(self.workload.turns)))
        prompt = self._mix.draw()
        turns = prompt.turns
        while turns and len(turns) < self.workload.turns:
            turns = (*turns, *self._mix.draw().turns[:1])
        return Prompt(prompt.domain, turns, prompt.token_ids)

    def system(self, rng: random.Random) -> str | None:
        """What stands before the conversation."""
        parts = [self.workload.opening, self.workload.system]
        if self._prefixes:
            parts.append(rng.choice(self._prefixes))
        return "\n".join(part for part in parts if part) or None

    def body(self, rng: random.Random, timed: Timed | None) -> dict[str, Any]:
        """Everything of a request but the prompt."""
        asked = timed.output_tokens if timed is not None else None
        body: dict[str, Any] = {"max_tokens": asked or self.workload.output_tokens.draw(rng)}
        if self.workload.ignore_eos:
            body["ignore_eos"] = True
        if self.workload.seeded:
            body["seed"] = rng.getrandbits(31)
        return body | dict(self.workload.body)

    def cancel_after(self, rng: random.Random, body: Mapping[str, Any]) -> int | None:
        """After how many tokens to hang up, if at all."""
        if rng.random() >= self.workload.cancel_share:
            return None
        return rng.randint(1, max(1, int(body["max_tokens"]) - 1))


class SessionUser(User):
    """Plays sessions one after another; `sessions` is set by `workload_user`."""

    sessions: Sessions

    def __init__(self, sender: Sender, rng: random.Random) -> None:
        super().__init__(sender, rng)
        self.timed: Timed | None = None

    @task
    async def session(self) -> None:
        """One conversation, or one completion."""
        sessions, timed = self.sessions, self.timed
        rng = sessions.rng()
        prompt, system = sessions.prompt(rng, timed), sessions.system(rng)
        if sessions.workload.endpoint == "completions":
            body = sessions.body(rng, timed)
            text: str | list[int] = list(prompt.token_ids)
            if prompt.turns:
                text = "\n".join(part for part in (system, prompt.turns[0]) if part)
            cancel = sessions.cancel_after(rng, body)
            await self.complete(text, name=prompt.domain, cancel_after=cancel, **body)
            return
        messages: Messages = [{"role": "system", "content": system}] if system else []
        for number, turn in enumerate(prompt.turns[: sessions.workload.turns]):
            if number:
                await self.pause()
            body = sessions.body(rng, timed)
            cancel = sessions.cancel_after(rng, body)
            turns = [*messages, {"role": "user", "content": turn}]
            reply = await self.chat(turns, name=prompt.domain, cancel_after=cancel, **body)
            if not reply.record.ok:
                return
            messages = reply.messages


def workload_user(workload: Workload, seed: str) -> type[SessionUser]:
    """The user class of a workload."""

    class WorkloadUser(SessionUser):
        sessions = Sessions(workload, seed)
        wait_time = between(*workload.think)

    return WorkloadUser
