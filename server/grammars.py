"""Compiles grammars off the event loop, and gives up on those that take too long."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor

from engine.grammar import Grammar
from engine.grammar_compiler import GrammarCompiler, GrammarError
from server.answer_grammar import GrammarSource
from server.errors import invalid, overloaded

_SECONDS = 10.0
_THREADS = 2


class Grammars:
    """The grammars of one model, kept once they are compiled."""

    def __init__(self, compiler: GrammarCompiler, seconds: float = _SECONDS) -> None:
        self._compiler = compiler
        self._seconds = seconds
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="grammar")
        self._free = asyncio.Semaphore(_THREADS)

    async def compiled(self, source: GrammarSource) -> Grammar:
        """Raises ApiError that blames the field, or the others whose grammars keep the threads busy."""
        try:
            async with asyncio.timeout(self._seconds):
                await self._free.acquire()
        except TimeoutError:
            raise overloaded("Too many grammars wait to be compiled.", self._seconds) from None
        param = source.param
        work = self._threads.submit(self._compile, source)
        self._release_after(work)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(work), self._seconds)
        except GrammarError as error:
            raise invalid(f"{param} does not make a grammar: {error}", param, "invalid_grammar") from None
        except TimeoutError:
            # The thread goes on until the library's own limits stop it; the result would still be kept.
            raise invalid(
                f"The grammar of {param} took more than {self._seconds:.0f} s to compile.",
                param,
                "grammar_too_complex",
            ) from None

    def _release_after(self, work: Future[Grammar]) -> None:
        """A thread is free when it is done, not when nobody waits for it any more."""
        loop = asyncio.get_running_loop()

        def done(_: Future[Grammar]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._free.release)

        work.add_done_callback(done)

    def _compile(self, source: GrammarSource) -> Grammar:
        return self._compiler.compile(*source.spelt())

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)
