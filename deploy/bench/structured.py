"""What a grammar costs: tokens a second with and without, in turns, in one process.

    .venv/bin/python -m deploy.bench.structured [--streams N ...] [--rounds N] [--policies P ...]

The same prompts are answered with so many tokens each, as free text and under grammars that go on for longer
than that: a list of records of a JSON schema, any JSON, text in which tools may be called. Text under a
grammar is other text, easier or harder to draft, so policies are shown apart; `off` shows the cost of the
grammar alone.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from functools import partial
from statistics import mean, median
from typing import Any

from engine.async_engine import AsyncEngine
from engine.grammar import Grammar
from engine.grammar_compiler import GrammarCompiler
from engine.outputs import NullObserver
from engine.params import SamplingParams
from engine.request import Request
from scheduler.policies import parse_policy
from server.answer_grammar import Calls, answer_grammar
from server.bench_prompts import PROMPTS
from server.settings import Settings
from server.structured import Form, json_rule
from server.tool_formats import HERMES
from server.tools import Function
from server.wiring import build_parts

RECORD = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 4, "maxLength": 40},
        "kind": {"enum": ["person", "place", "thing"]},
        "year": {"type": "integer", "minimum": 0, "maximum": 2030},
        "notes": {"type": "array", "items": {"type": "string", "minLength": 8}, "minItems": 2, "maxItems": 3},
    },
    "required": ["name", "kind", "year", "notes"],
    "additionalProperties": False,
}
SOURCES = {
    "none": None,
    "schema": answer_grammar(Form("", json_rule({"type": "array", "items": RECORD, "minItems": 100}))),
    "json": answer_grammar(
        Form("", json_rule({"type": "array", "items": {"type": "object"}, "minItems": 100}))
    ),
    "tools": answer_grammar(None, Calls(HERMES, [Function(name="look_up", parameters=RECORD)])),
}


class Steps(NullObserver):
    """Keeps the time that went into deciding rows."""

    def __init__(self) -> None:
        self.seconds: list[tuple[float, float, float]] = []

    def step(self, stats: Any) -> None:
        self.seconds.append((stats.step_time, stats.verify_time, stats.draft_time))


async def wave(engine: AsyncEngine, prompts: list[list[int]], grammar: Grammar | None, tokens: int) -> float:
    """Tokens a second of one request a prompt, all at once."""
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    begun, count = time.perf_counter(), 0
    requests = [
        Request(f"{begun}-{i}", ids, params, f"{begun}-{i}", grammar=grammar) for i, ids in enumerate(prompts)
    ]

    async def answer(request: Request) -> int:
        async with engine.submit(request) as stream:
            async for _ in stream:
                pass
        return stream.usage.completion_tokens

    count = sum(await asyncio.gather(*map(answer, requests)))
    return count / (time.perf_counter() - begun)


async def measure(options: argparse.Namespace) -> None:
    steps = Steps()
    parts = build_parts(Settings(), steps, lambda line: None)
    tokenizer = parts.tokenizer
    encode = partial(tokenizer.encode, add_special_tokens=False)
    compiler = GrammarCompiler(tokenizer.token_bytes, tokenizer.special_ids, encode)
    grammars = {name: source and compiler.compile(*source.spelt()) for name, source in SOURCES.items()}
    policies = options.policies or ["off", parts.info["verify_policy"]]
    if any(policy != "off" for policy in policies):
        parts.loop.speculation.throughput = parts.profile(False)
    engine, drafter = AsyncEngine(parts.loop, parts.worker, parts.tokenizer), parts.worker.drafter
    await engine.start()
    prompts = itertools.cycle(
        list(parts.tokenizer.apply_chat_template([{"role": "user", "content": text}])) for text in PROMPTS
    )
    print("streams  policy      grammar   tokens/s  of free text  step ms  deciding ms")
    for streams, policy in itertools.product(options.streams, policies):
        parts.loop.speculation.policy = parse_policy(policy)
        parts.worker.drafter = None if policy == "off" else drafter
        rates: dict[str, list[float]] = {name: [] for name in grammars}
        spent: dict[str, list[tuple[float, float, float]]] = {name: [] for name in grammars}
        for turn in range(options.rounds + 1):  # the first warms up
            batch = [next(prompts) for _ in range(streams)]
            for name, grammar in grammars.items():
                steps.seconds.clear()
                rate = await wave(engine, batch, grammar, options.max_tokens)
                if turn:
                    rates[name].append(rate)
                    spent[name] += steps.seconds
        for name in grammars:
            share = median(a / b for a, b in zip(rates[name], rates["none"], strict=True))
            step, decide = (1e3 * mean(each[i] for each in spent[name]) for i in (0, 1))
            print(
                f"{streams:7}  {policy:<10}  {name:<8} {median(rates[name]):9.1f} {share:13.2f} "
                f"{step:8.1f} {decide:12.2f}",
                flush=True,
            )
    await engine.drain(0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--policies", nargs="+")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=48)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
