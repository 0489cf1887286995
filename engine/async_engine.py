"""The only door for the server: submit requests and await output, while steps run on a worker thread."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Literal

from engine.batch import StepResult, VerificationBatch
from engine.loop import Delta, EngineLoop
from engine.outputs import EngineGauges, OutputDelta, RequestStats, Usage
from engine.queue_pace import QueuePace
from engine.request import ActiveRequest, Request
from engine.tokenizer import Tokenizer
from engine.worker import Worker

log = logging.getLogger("dspark.engine")

#: steps in a row that may fail before the engine gives up
_FATAL_FAILURES = 5
#: seconds that the step in flight gets to end when everything has been aborted
_LAST_STEP = 10.0
#: steps that a sequence is taken to hold its seat for, until it has been seen
_STEPS_SEATED = 64


class QueueFull(RuntimeError):
    """Too many requests are waiting, or for too long; try again after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: float, reason: str = "queue_full") -> None:
        super().__init__(message)
        self.retry_after, self.reason = retry_after, reason


class Draining(RuntimeError):
    """The engine is shutting down and takes no new requests."""


class EngineDead(RuntimeError):
    """The engine failed for good."""


class RequestStream:
    """Output of one request: an async iterator over the deltas of all its choices, interleaved.

    It ends after the last delta of the last choice. As a context manager it aborts the request if it is left
    before that. A slow reader costs nobody anything: pieces wait here, bounded by the request's max_tokens.
    """

    def __init__(self, engine: AsyncEngine, active: ActiveRequest) -> None:
        self._engine = engine
        self._active = active
        self._pieces: deque[OutputDelta] = deque()
        self._ready = asyncio.Event()
        self._open = len(active.sequences)  # choices whose end has not been read yet
        self._promised = set(range(len(active.sequences)))  # those whose end has not been put here yet

    @property
    def usage(self) -> Usage:
        """Grows while the request runs."""
        return self._active.usage

    @property
    def stats(self) -> RequestStats:
        """The request's figures at this moment."""
        return self._active.stats(self._engine._loop.clock())

    @property
    def finished(self) -> bool:
        """Whether the engine has produced the last piece (it may not have been read yet)."""
        return self._active.finished

    def abort(self) -> None:
        """End the request; what it holds is freed within a step. Does nothing if it has ended."""
        if not self._active.finished:
            self._engine.abort(self._active.request.request_id)

    def _put(self, delta: OutputDelta) -> None:
        self._pieces.append(delta)
        if delta.finish_reason is not None:
            self._promised.discard(delta.index)
        self._ready.set()

    async def batch(self) -> list[OutputDelta]:
        """All pieces that wait, at least one; empty after the last. One write can carry them all."""
        while self._open and not self._pieces:
            self._ready.clear()
            await self._ready.wait()
        pieces = list(self._pieces)
        self._pieces.clear()
        self._open -= sum(delta.finish_reason is not None for delta in pieces)
        return pieces

    async def __aiter__(self) -> AsyncIterator[OutputDelta]:
        while pieces := await self.batch():
            for delta in pieces:
                yield delta

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()


class AsyncEngine:
    """Runs an EngineLoop on the event loop and its Worker on one thread, one step in flight at a time.

    `max_queued` bounds the sequences that wait for a seat, `max_wait` the seconds that a newcomer would have
    to (0: no bound); `info` is what `/version` tells about the engine.
    """

    def __init__(
        self,
        loop: EngineLoop,
        worker: Worker,
        tokenizer: Tokenizer,
        *,
        max_queued: int = 512,
        max_wait: float = 0.0,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.info: Mapping[str, Any] = info or {}
        self.state: Literal["starting", "running", "draining", "dead"] = "starting"
        self.max_queued = max_queued
        self.max_wait = max_wait
        self._loop = loop
        self._worker = worker
        self._streams: dict[str, RequestStream] = {}
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()  # nobody waits for output
        self._idle.set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dspark-worker")
        self._task: asyncio.Task[None] | None = None
        self._step_begun: float | None = None
        self._step_time = 0.05  # running mean, seconds
        self._pace = QueuePace()

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        return self._loop.intake.max_model_len

    def gauges(self) -> EngineGauges:
        return self._loop.gauges()

    def scheduler_state(self) -> dict[str, Any]:
        """What the scheduler knows, for operators."""
        return self._loop.speculation.state()

    def step_age(self) -> float:
        """Seconds that the present worker call has been running; 0 if none is."""
        return 0.0 if self._step_begun is None else time.monotonic() - self._step_begun

    # ---- life

    async def start(self) -> None:
        """Begin to serve."""
        self._task = asyncio.create_task(self._run(), name="dspark-engine")
        self.state = "running"

    async def drain(self, timeout: float) -> None:
        """Refuse new requests, let the accepted ones finish for `timeout` seconds, abort the rest, stop.

        A step that does not even end then is given up: its requests fail, and `step_age` stays above 0.
        """
        if self.state == "running":
            self.state = "draining"
        if self._task is not None and not self._task.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), timeout)
            for request_id in list(self._streams):
                self.abort(request_id)
            with contextlib.suppress(TimeoutError):  # a worker call that never returns must not keep us
                await asyncio.wait_for(self._idle.wait(), _LAST_STEP)
            if self._step_begun is not None:
                self._end_all(f"the step in flight has not ended in {self.step_age():.0f} s")
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._thread.shutdown(wait=False)

    # ---- requests

    def submit(self, request: Request, *, patient: bool = False) -> RequestStream:
        """Accept a request; nothing accepted is lost. A `patient` one may wait longer than `max_wait`.

        Raises ParamError (it can never run), QueueFull, Draining or EngineDead.
        """
        if self.state == "dead":
            raise EngineDead("the engine has failed; see the server's log")
        if self.state != "running":
            raise Draining("the server is shutting down" if self.state == "draining" else "still starting")
        try:
            self.check_room(request.params.n, request.priority, patient)
        except QueueFull:
            self._loop.intake.check(request)  # a request that can never run is told so, full or not
            raise
        active = self._loop.add(request)
        stream = RequestStream(self, active)
        self._streams[request.request_id] = stream
        self._idle.clear()
        self._wake.set()
        return stream

    def check_room(self, n: int = 1, priority: int = 0, patient: bool = False) -> None:
        """Raises QueueFull where `n` choices would not be taken: told at once, not served too late.

        For whoever would rather know before a prompt is worked on; `submit` looks by itself.
        """
        queue = self._loop.waiting
        guess = _STEPS_SEATED * self._step_time / self._loop.limits.max_sequences
        before = sum(each.rank[0] <= priority for each in queue)
        wait = self._pace.wait(before, time.monotonic(), guess)
        if len(queue) + n > self.max_queued:
            raise QueueFull(f"{len(queue)} sequences are waiting already", max(1.0, wait))
        if not patient and 0 < self.max_wait < wait:
            message = f"{before} sequences are waiting, for about {wait:.0f} s"
            raise QueueFull(message, max(1.0, wait - self.max_wait), "queue_wait")

    def abort(self, request_id: str) -> None:
        """End a request, now or with the step in flight."""
        self._loop.abort(request_id)
        self._wake.set()

    # ---- the loop

    async def _run(self) -> None:
        """Dispatch steps for ever; the text of step n is streamed while step n + 1 computes."""
        unsent: list[Delta] = []
        failures = 0
        executor = asyncio.get_running_loop()
        try:
            while True:
                batch = self._begin()
                if batch is None:
                    self._send(unsent + self._loop.drain_aborted())
                    unsent = []
                    self._wake.clear()
                    if not self._loop.has_work:
                        await self._wake.wait()
                    else:  # something waits that cannot run: abort and arrival wake us, time ages it
                        await asyncio.sleep(0.01)
                    continue
                self._step_begun = time.monotonic()
                step = executor.run_in_executor(self._thread, self._worker.run, batch)
                self._send(unsent)
                outcome = await self._outcome(step)
                self._step_time += 0.1 * (time.monotonic() - self._step_begun - self._step_time)
                self._step_begun = None
                if isinstance(outcome, StepResult):
                    unsent = self._loop.commit(batch, outcome)
                    failures = 0
                else:
                    unsent = self._failed(batch, outcome)
                    failures += 1
                    if failures >= _FATAL_FAILURES:
                        raise EngineDead(f"{failures} steps in a row failed") from outcome
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            log.exception("the engine stopped")
            self.state = "dead"
            self._step_begun = None
            self._send(unsent)
            self._end_all(f"the engine failed: {error}")

    def _begin(self) -> VerificationBatch | None:
        seated = self._loop.seated
        batch = self._loop.begin()
        self._pace.admitted(self._loop.seated - seated, self._loop.held, time.monotonic())
        return batch

    @staticmethod
    async def _outcome(step: asyncio.Future[StepResult]) -> StepResult | Exception:
        try:
            return await step
        except Exception as error:
            return error

    def _failed(self, batch: VerificationBatch, error: Exception) -> list[Delta]:
        log.error("a step of %d rows failed", batch.rows, exc_info=error)
        return self._loop.fail(batch, f"the step that computed this request failed: {error}")

    def _send(self, deltas: list[Delta]) -> None:
        for active, delta in deltas:
            request_id = active.request.request_id
            stream = self._streams.get(request_id)
            if stream is None:
                continue
            stream._put(delta)
            if not stream._promised:
                del self._streams[request_id]
        if not self._streams:
            self._idle.set()

    def _end_all(self, message: str) -> None:
        for stream in list(self._streams.values()):
            for choice in sorted(stream._promised):
                stream._active.sequences[choice].finish_reason = "error"
                stream._put(OutputDelta(choice, "", (), (), "error", None, message))
        self._streams.clear()
        self._idle.set()
