"""The server's door: streams, backpressure, draining, failures, and text that overlaps with computing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from engine import async_engine
from engine.async_engine import AsyncEngine, Draining, EngineDead, QueueFull, RequestStream
from engine.batch import VerificationBatch
from engine.outputs import OutputDelta
from engine.params import ParamError, SamplingParams
from engine.request import Request
from tests.engine.harness import Engine, Output, babbler, one_thread, tiny  # noqa: F401

PROMPT = [3, 14, 15, 9, 26]
LIMIT = 20.0  # seconds after which something hangs


class Gate:
    """An executor that waits at the door when it is closed, and fails or slows down when told to."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.door = threading.Event()
        self.door.set()
        self.tokens = threading.Semaphore(0)  # each lets one step through the closed door
        self.entered = threading.Semaphore(0)  # released at each step's begin
        self.steps = 0
        self.fail: Callable[[int], bool] = lambda step: False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def forward(self, batch: VerificationBatch, feature_layers: tuple[int, ...] = ()) -> Any:
        self.steps += 1
        step = self.steps
        self.entered.release()
        waited = 0.0
        while not self.door.is_set() and not self.tokens.acquire(timeout=0.005):
            waited += 0.005
            assert waited < LIMIT
        if self.fail(step):
            raise RuntimeError(f"step {step} is broken")
        return self.inner.forward(batch, feature_layers)

    def let_one_through(self) -> None:
        self.tokens.release()

    def open(self) -> None:
        self.door.set()

    def close(self) -> None:
        self.door.clear()

    async def begun(self) -> None:
        """Wait until one more step has begun."""
        assert await asyncio.to_thread(self.entered.acquire, timeout=LIMIT)


class Serving:
    """An AsyncEngine, and what a test wants to see of its inside."""

    def __init__(self, max_queued: int = 64, max_wait: float = 0.0, **options: Any) -> None:
        self.inside = Engine(tiny(), wrap=Gate, **options)
        self.gate: Gate = self.inside.executor
        self.loop = self.inside.loop
        self.engine = AsyncEngine(
            self.loop,
            self.inside.worker,
            object(),
            max_queued=max_queued,
            max_wait=max_wait,
            info={"name": "tiny"},
        )
        self._names = 0

    def submit(
        self, prompt: list[int] = PROMPT, *, patient: bool = False, priority: int = 0, **params: Any
    ) -> RequestStream:
        self._names += 1
        settings = {"max_tokens": 12, "ignore_eos": True, "seed": 1, **params}
        sampling = SamplingParams(**settings)
        request = Request(f"r{self._names}", list(prompt), sampling, priority=priority)
        return self.engine.submit(request, patient=patient)


@asynccontextmanager
async def serving(**options: Any) -> AsyncIterator[Serving]:
    """Start, then drain; afterwards nothing may be left: no task, no page, no sequence, no thread."""
    others = asyncio.all_tasks()
    served = Serving(**options)
    await served.engine.start()
    try:
        yield served
    finally:
        served.gate.open()
        await asyncio.wait_for(served.engine.drain(5.0), LIMIT)
    assert asyncio.all_tasks() == others
    await until(lambda: not any(each.name.startswith("dspark-worker") for each in threading.enumerate()))
    assert not served.engine._streams
    if served.engine.state != "dead":
        served.inside.check_idle()


async def read(stream: RequestStream) -> list[Output]:
    """Everything a stream has to say, by choice."""
    outputs: dict[int, Output] = {}
    async for delta in stream:
        outputs.setdefault(delta.index, Output()).take(delta)
    return [outputs[index] for index in sorted(outputs)]


def within(awaitable: Any) -> Any:
    return asyncio.wait_for(awaitable, LIMIT)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT):
        while not condition():  # noqa: ASYNC110 - nothing tells us
            await asyncio.sleep(0.001)


def expected(**params: Any) -> list[Output]:
    engine = Engine(tiny())
    engine.add("a", PROMPT, **{"max_tokens": 12, "ignore_eos": True, "seed": 1, **params})
    engine.run()
    return engine.outputs["a"]


async def test_a_stream_says_everything_in_order_and_then_ends():
    async with serving() as served:
        assert served.engine.max_model_len == 128
        assert served.engine.info == {"name": "tiny"}
        stream = served.submit()
        assert not stream.finished
        assert await within(read(stream)) == expected()
        assert stream.finished
        assert stream.usage.completion_tokens == 12
        assert await stream.batch() == []
        assert await read(stream) == []


async def test_many_consumers_get_their_own_text_at_the_same_time():
    async with serving(drafter=babbler(), policy="fixed:3", num_pages=128) as served:
        streams = [served.submit(seed=seed) for seed in range(16)]
        texts = await within(asyncio.gather(*map(read, streams)))
    assert texts == [expected(seed=seed) for seed in range(16)]


@pytest.mark.parametrize("n", [2, 3, 5])
async def test_all_choices_end_although_several_end_in_the_same_step(n):
    async with serving() as served:
        assert await within(read(served.submit(n=n))) == expected(n=n)


async def test_idle_engines_wait_and_then_take_up_work_again():
    async with serving() as served:
        for _ in range(3):
            assert await within(read(served.submit())) == expected()
            await asyncio.sleep(0.01)
            assert served.engine.step_age() == 0.0
            assert served.engine.gauges().running == 0


# ---- overlap


async def test_the_text_of_a_step_is_delivered_while_the_next_one_computes():
    async with serving() as served:
        gate = served.gate
        gate.close()
        stream = served.submit()
        await gate.begun()
        for step in range(1, 6):
            gate.let_one_through()
            await gate.begun()  # the next one, which stays at the door
            [delta] = await within(stream.batch())
            assert len(delta.token_ids) == 1
            assert gate.steps == step + 1
            assert served.engine.step_age() > 0.0
        gate.open()
        await within(read(stream))


async def test_what_waits_for_a_reader_comes_as_one_batch():
    async with serving() as served:
        stream = served.submit()
        await until(lambda: stream.finished)
        await until(lambda: not served.engine._streams)
        deltas = await within(stream.batch())
        assert len(deltas) == 12
        assert await within(stream.batch()) == []


async def test_the_event_loop_is_free_while_a_step_computes():
    async with serving() as served:
        served.gate.close()
        stream = served.submit()
        await served.gate.begun()
        assert 0.0 < served.engine.step_age() < LIMIT
        late = served.submit(seed=2)  # arrives during a step
        assert served.engine.gauges().waiting == 1
        served.gate.open()
        assert await within(asyncio.gather(read(stream), read(late))) == [expected(), expected(seed=2)]


async def test_a_slow_reader_holds_up_nobody():
    async with serving() as served:
        slow, quick = served.submit(seed=1), served.submit(seed=2)
        assert await within(read(quick)) == expected(seed=2)
        await until(lambda: slow.finished)  # although nobody reads it
        pages = served.loop.gauges()
        assert pages.pages_free + pages.pages_cached == pages.pages_total
        assert await within(read(slow)) == expected(seed=1)


# ---- leaving early


async def test_leaving_a_stream_frees_its_pages_with_the_step_in_flight():
    async with serving() as served:
        served.gate.close()
        async with served.submit(max_tokens=100) as stream:
            await served.gate.begun()
            served.gate.let_one_through()
            await served.gate.begun()
            await within(stream.batch())
        assert served.loop.gauges().kv_usage > 0.0, "a step is in flight that writes them"
        served.gate.open()
        await until(lambda: served.loop.gauges().kv_usage == 0.0)
        assert served.gate.steps == 2, "the step in flight was its last"
        assert served.loop.gauges().running == 0
        tail = await within(read(stream))
        assert tail[0].finish == "abort"


async def test_leaving_before_a_seat_is_free_ends_at_once():
    async with serving(max_sequences=1) as served:
        first = served.submit()
        async with served.submit(seed=2) as second:
            await served.gate.begun()
            assert served.engine.gauges().waiting == 1
        assert served.engine.gauges().waiting == 0
        assert [output.finish for output in await within(read(second))] == ["abort"]
        assert await within(read(first)) == expected()


async def test_an_exception_or_a_cancelled_task_aborts_too():
    async with serving() as served:

        async def consume(divisor: int) -> None:
            async with served.submit(max_tokens=100) as stream:
                async for _ in stream:
                    1 / divisor

        with pytest.raises(ZeroDivisionError):
            await within(consume(0))
        await until(lambda: not served.loop.requests)
        task = asyncio.create_task(consume(1))
        await served.gate.begun()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: not served.loop.requests)


async def test_leaving_a_finished_stream_changes_nothing():
    async with serving() as served:
        async with served.submit() as stream:
            outputs = await within(read(stream))
        assert outputs == expected()
        stream.abort()
        assert stream.usage.completion_tokens == 12


async def test_every_choice_of_an_aborted_request_ends():
    """Some in the step in flight, others waiting for a seat."""
    async with serving(max_sequences=2) as served:
        stream = served.submit(n=4, max_tokens=100)
        for _ in range(3):
            await served.gate.begun()
        stream.abort()
        outputs = await within(read(stream))
        assert [output.finish for output in outputs] == ["abort"] * 4


# ---- too much


async def test_a_full_queue_refuses_and_says_when_to_come_back():
    async with serving(max_sequences=1, max_queued=3) as served:
        served.gate.close()
        running = served.submit()
        await served.gate.begun()
        queued = [served.submit(seed=2), served.submit(seed=3)]
        with pytest.raises(QueueFull) as caught:
            served.submit(n=2)
        assert caught.value.retry_after >= 1.0
        queued.append(served.submit(seed=4))
        with pytest.raises(QueueFull):
            served.submit()
        with pytest.raises(ParamError):
            served.submit(temperature=-1.0)  # no use coming back with this one
        assert served.engine.gauges().waiting == 3
        served.gate.open()
        texts = await within(asyncio.gather(*map(read, [running, *queued])))
        assert texts == [expected(seed=seed) for seed in (1, 2, 3, 4)]
        assert await within(read(served.submit())) == expected()


async def test_who_would_wait_too_long_is_told_at_once():
    async with serving(max_sequences=1, max_wait=5.0) as served:
        served.engine._pace.admitted(0, True, 0.0)
        served.engine._pace.admitted(1, False, 3.0)  # three seconds a seat
        served.gate.close()
        running = served.submit()
        await served.gate.begun()
        queued = [served.submit(seed=2), served.submit(seed=3)]  # the second would wait for three
        with pytest.raises(QueueFull) as caught:
            served.submit(seed=4)
        assert caught.value.retry_after == pytest.approx(1.0)  # six seconds, less five
        assert caught.value.reason == "queue_wait"
        urgent = served.submit(seed=6, priority=-1)  # before whom nobody waits
        queued.append(served.submit(seed=4, patient=True))
        with pytest.raises(ParamError):
            served.submit(temperature=-1.0)
        served.gate.open()
        texts = await within(asyncio.gather(*map(read, [running, *queued])))
        assert texts == [expected(seed=seed) for seed in (1, 2, 3, 4)]
        assert await within(read(urgent)) == expected(seed=6)
        seat = served.engine._pace.wait(1, time.monotonic(), 0.0)
        assert seat < 3.0  # learnt from the seats that came free since


async def test_a_request_that_can_never_run_is_refused_at_the_door():
    async with serving() as served:
        with pytest.raises(ParamError):
            served.submit([])
        assert not served.loop.has_work


# ---- the end


async def test_draining_lets_accepted_requests_finish_and_takes_no_others():
    async with serving(max_sequences=2) as served:
        streams = [served.submit(seed=seed) for seed in range(4)]
        await served.gate.begun()
        drained = asyncio.create_task(served.engine.drain(LIMIT))
        await asyncio.sleep(0)
        assert served.engine.state == "draining"
        with pytest.raises(Draining):
            served.submit()
        texts = await within(asyncio.gather(*map(read, streams)))
        await within(drained)
    assert texts == [expected(seed=seed) for seed in range(4)]
    with pytest.raises(Draining):
        served.submit()


async def test_draining_aborts_what_is_left_after_the_timeout():
    async with serving(max_sequences=2) as served:
        streams = [served.submit(seed=seed, max_tokens=100, n=2) for seed in range(3)]
        await served.gate.begun()
        await within(served.engine.drain(0.0))
        for stream in streams:
            outputs = await within(read(stream))
            assert [output.finish for output in outputs] == ["abort", "abort"]


async def test_a_step_that_never_ends_is_given_up_and_its_requests_are_told(monkeypatch):
    monkeypatch.setattr(async_engine, "_LAST_STEP", 0.05)
    served = Serving(max_sequences=2)
    served.gate.close()
    await served.engine.start()
    streams = [served.submit(seed=seed, n=2) for seed in range(3)]
    await served.gate.begun()
    await within(served.engine.drain(0.0))
    for stream in streams:
        outputs = await within(read(stream))
        assert [output.finish for output in outputs] == ["error", "error"]
        assert all("has not ended" in output.error for output in outputs)
    assert served.engine.step_age() > 0.0
    served.gate.open()


async def test_nothing_is_taken_before_the_start():
    served = Serving()
    assert served.engine.state == "starting"
    with pytest.raises(Draining, match="starting"):
        served.submit()
    await within(served.engine.drain(0.0))


async def test_an_idle_engine_drains_at_once():
    async with serving() as served:
        await asyncio.wait_for(served.engine.drain(LIMIT), 1.0)


# ---- failures


async def test_a_step_that_fails_ends_its_requests_and_the_engine_goes_on():
    async with serving(max_sequences=2) as served:
        served.gate.fail = lambda step: step == 3
        streams = [served.submit(seed=seed) for seed in range(4)]
        first, second, *rest = await within(asyncio.gather(*map(read, streams)))
        for [output] in (first, second):
            assert output.finish == "error"
            assert "step 3 is broken" in output.error
            assert len(output.tokens) == 2
        assert rest == [expected(seed=2), expected(seed=3)]
        assert await within(read(served.submit())) == expected()
        assert served.engine.state == "running"


async def test_failures_with_successes_between_them_kill_nobody_else():
    async with serving(max_sequences=1) as served:
        served.gate.fail = lambda step: step % 5 != 0
        finishes = [(await within(read(served.submit())))[0].finish for _ in range(12)]
        assert finishes == ["error"] * 12
        assert served.engine.state == "running"
        served.gate.fail = lambda step: False
        assert await within(read(served.submit())) == expected()


async def test_an_engine_that_fails_again_and_again_dies_and_tells_everybody():
    async with serving(max_sequences=1) as served:
        served.gate.fail = lambda step: True
        streams = [served.submit(seed=seed, n=1 + seed % 2) for seed in range(8)]
        outputs = [output for each in await within(asyncio.gather(*map(read, streams))) for output in each]
        assert len(outputs) == 12
        assert {output.finish for output in outputs} == {"error"}
        assert all(output.error for output in outputs)
        assert served.engine.state == "dead"
        assert all(stream.finished for stream in streams)
        with pytest.raises(EngineDead):
            served.submit()
        streams[-1].abort()


async def test_a_fault_in_the_engines_own_loop_leaves_no_consumer_waiting(monkeypatch):
    async with serving(max_sequences=2) as served:
        served.gate.close()
        streams = [served.submit(seed=seed, n=2) for seed in range(3)]
        await served.gate.begun()
        streams[2].abort()  # waits for a seat, and its ends have not been told yet

        def broken(*_: Any) -> list[OutputDelta]:
            raise AssertionError("a bug")

        monkeypatch.setattr(served.loop, "commit", broken)
        served.gate.open()
        outputs = await within(asyncio.gather(*map(read, streams)))
        assert [len(each) for each in outputs] == [2, 2, 2]
        assert {output.finish for each in outputs[:2] for output in each} == {"error"}
        assert served.engine.state == "dead"


async def test_an_abort_and_a_failing_step_together_still_end_every_choice():
    async with serving(max_sequences=2) as served:
        served.gate.close()
        stream = served.submit(n=3)
        for _ in range(2):
            await served.gate.begun()
            served.gate.let_one_through()
        await served.gate.begun()
        served.gate.fail = lambda step: True
        stream.abort()  # one choice waits, the others are in the step that fails
        served.gate.open()
        outputs = await within(read(stream))
        served.gate.fail = lambda step: False
        assert sorted(output.finish for output in outputs) == ["abort", "error", "error"]
