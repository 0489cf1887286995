"""What all endpoints share: settings, metrics, the engine once it is there, threads for long text work."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, TypeVar

from engine.async_engine import AsyncEngine
from engine.grammar import Grammar
from engine.grammar_compiler import GrammarCompiler
from server.answer_grammar import GrammarSource
from server.answer_plan import AnswerWays
from server.errors import ApiError, internal, invalid, overloaded, shutting_down
from server.grammars import Grammars
from server.metrics import Metrics
from server.prompts import PromptEncoder
from server.settings import Settings
from server.versions import versions

Result = TypeVar("Result")

# What of the engine's description may change the text of a seeded request.
_DECISIVE = ("model", "architecture", "dtype", "executor", "kernels", "device", "torch_version")


class ServerContext:
    """One per application. `engine` is None while the model loads; `draining` is set once, at shutdown."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.settings = settings
        self.metrics = metrics
        self.engine: AsyncEngine | None = None
        self.draining = False
        self.tracer: Any = None  # OpenTelemetry's, where requests are traced
        self.started_at = int(time.time())
        # Two are enough: the point is that the event loop stays free, not that text work is parallel.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="text")

    @property
    def body_limit(self) -> int:
        """Largest request body in bytes."""
        return int(self.settings.max_body_size * 2**20)

    def loaded(self) -> AsyncEngine:
        """The engine, whatever its state; raises ApiError while there is none."""
        if self.engine is None or self.engine.state == "starting":
            raise overloaded("The model is still loading; try again soon.", 5.0, code="model_loading")
        return self.engine

    def accepting(self) -> AsyncEngine:
        """The engine if it takes new requests; raises ApiError and counts the rejection if not."""
        try:
            engine = self.loaded()
        except ApiError:
            self.metrics.rejected("loading")
            raise
        if engine.state == "dead":
            raise internal("The inference engine has died; the server must be restarted.", "engine_dead")
        if self.draining or engine.state == "draining":
            self.metrics.rejected("draining")
            raise shutting_down()
        return engine

    def unready(self) -> str | None:
        """Why no traffic should be sent here now; None if it may."""
        if self.draining:
            return "draining"
        if self.engine is None:
            return "starting"
        if self.engine.state != "running":
            return self.engine.state
        age = self.engine.step_age()
        if age > self.settings.ready_step_limit:
            return f"the present step has been running for {age:.0f} s"
        return None

    def check_model(self, name: str | None) -> str:
        """The name under which to answer a request for model `name`; raises ApiError for an unknown one."""
        names = self.settings.model_names
        if name is None:
            return names[0]
        if name not in names:
            raise ApiError(404, f"The model {name!r} does not exist.", param="model", code="model_not_found")
        return name

    def check_choices(self, prompts: int, n: int) -> None:
        """Refuse more than could ever wait together: a 503 would be tried again forever."""
        most = self.settings.max_num_queued_reqs
        if prompts * n > most:
            raise invalid(
                f"One request may ask for {most} choices, not for {prompts} prompts x {n}.",
                "n" if prompts == 1 else "prompt",
            )

    @cached_property
    def encoder(self) -> PromptEncoder:
        """Text to tokens, for the loaded model."""
        return PromptEncoder(self.loaded())

    @cached_property
    def ways(self) -> AnswerWays:
        """How the loaded model calls tools and thinks."""
        return AnswerWays.of(self.loaded().tokenizer, self.settings)

    @cached_property
    def grammars(self) -> Grammars:
        """Compiled for the loaded model's vocabulary."""
        tokenizer = self.loaded().tokenizer
        encode = partial(tokenizer.encode, add_special_tokens=False)
        return Grammars(GrammarCompiler(tokenizer.token_bytes, tokenizer.special_ids, encode))

    @cached_property
    def fingerprint(self) -> str:
        """system_fingerprint: the same for two servers that answer a seeded request alike."""
        info = self.loaded().info
        decisive = json.dumps([versions()["dspark-server"], *(str(info.get(key)) for key in _DECISIVE)])
        return "fp_" + hashlib.sha256(decisive.encode()).hexdigest()[:12]

    async def compiled(self, source: GrammarSource | None) -> Grammar | None:
        """The grammar for an answer; raises ApiError if there is none."""
        return None if source is None else await self.grammars.compiled(source)

    async def off_loop(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run a slow pure function without holding up the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def close(self) -> None:
        """Let the threads go."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        if "grammars" in self.__dict__:
            self.grammars.close()
