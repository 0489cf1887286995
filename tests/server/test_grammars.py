"""Compiling grammars beside the event loop: who waits, who is blamed, what becomes of the threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from server import answer_grammar
from server.answer_grammar import GrammarSource
from server.errors import ApiError
from server.grammars import Grammars
from server.structured import lark


class Compiler:
    """Takes as long as the test likes."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.seen: list[str] = []

    def compile(self, text: str, parts: Any = None) -> Any:
        self.seen.append(text)
        if text == "slow":
            self.go.wait(10)
        return f"compiled {text}"


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    compiler = Compiler()
    yield compiler
    compiler.go.set()


def source(text: str, answer: str | None = None) -> GrammarSource:
    return GrammarSource(text, "structured_outputs.grammar", answer)


async def test_who_takes_too_long_is_blamed_and_who_waits_is_not(compiler: Compiler) -> None:
    grammars = Grammars(compiler, seconds=0.3)  # type: ignore[arg-type]
    slow = [asyncio.create_task(grammars.compiled(source("slow"))) for _ in range(2)]
    await asyncio.sleep(0.05)
    with pytest.raises(ApiError) as waited:
        await grammars.compiled(source("quick"))
    assert (waited.value.status, waited.value.code) == (503, "server_overloaded")
    for task in slow:
        with pytest.raises(ApiError) as blamed:
            await task
        assert (blamed.value.status, blamed.value.code) == (400, "grammar_too_complex")
    assert compiler.seen == ["slow", "slow"]
    compiler.go.set()
    assert await grammars.compiled(source("quick")) == "compiled quick"
    grammars.close()


async def test_a_clients_grammar_is_translated_off_the_loop(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def translated(text: str) -> str:
        threads.append(threading.current_thread().name)
        return lark(text)

    monkeypatch.setattr(answer_grammar, "lark", translated)
    grammars = Grammars(compiler)  # type: ignore[arg-type]
    chain = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(300)) + 'r300 ::= "a"\n'
    assert str(await grammars.compiled(source("", chain))).startswith("compiled")
    assert "R300" in compiler.seen[0]
    assert "::=" not in compiler.seen[0]
    assert threads[0].startswith("grammar")
    with pytest.raises(ApiError) as refused:
        await grammars.compiled(source("", 'root ::= "a"\n' * 1001))
    assert refused.value.param == "structured_outputs.grammar"
    grammars.close()
