"""Compiles grammars off the event loop, and gives up on those that take too long."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from engine.grammar import Grammar
from engine.grammar_compiler import GrammarCompiler, GrammarError
from server.answer_grammar import GrammarSource
from server.errors import invalid

_SECONDS = 10.0


class Grammars:
    """The grammars of one model, kept once they are compiled."""

    def __init__(self, compiler: GrammarCompiler, seconds: float = _SECONDS) -> None:
        self._compiler = compiler
        self._seconds = seconds
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="grammar")

    async def compiled(self, source: GrammarSource) -> Grammar:
        """Raises ApiError that blames the field."""
        param = source.param
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, self._compiler.compile, source.text, source.parts)
        try:
            return await asyncio.wait_for(work, self._seconds)
        except GrammarError as error:
            raise invalid(f"{param} does not make a grammar: {error}", param, "invalid_grammar") from None
        except TimeoutError:
            # The thread goes on until the library's own limits stop it; the result would still be kept.
            raise invalid(
                f"The grammar of {param} took more than {self._seconds:.0f} s to compile.",
                param,
                "grammar_too_complex",
            ) from None

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)
