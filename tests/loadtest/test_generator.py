"""Load on a virtual clock: what is measured can be told beforehand, to the last digit."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest.arrivals import OpenLoop, Timed
from loadtest.client import Target
from loadtest.generator import ERROR_PAUSE, Tick
from loadtest.lengths import Lengths
from loadtest.observe import Observation
from loadtest.plan import Plan
from loadtest.prompts import Prompt
from loadtest.record import Record
from loadtest.run import window_of
from loadtest.saturation import saturated
from loadtest.slo import Slo
from loadtest.summary import Window, summarize
from loadtest.workload import Workload
from tests.loadtest.virtual import Virtual

WORK = Workload(output_tokens=Lengths("fixed", 20))


def plan(work: Workload = WORK, **fields: Any) -> Plan:
    return Plan(Target("http://virtual", "m"), work, **fields)


def summary(records: list[Record], begin: float, end: float, slo: str = "ttft:250 tpot:60") -> dict[str, Any]:
    return summarize(records, Window(begin, end), Slo.parse(slo.split()))


@pytest.mark.parametrize("width", [1, 3, 5])
def test_a_closed_loop_measures_what_the_server_does(virtual: Virtual, width: int) -> None:
    virtual.server.width = width
    records, begin = virtual.play(plan(users=4, run_time=60.0))
    out = summary(records, begin, begin + 60.0)
    chunks = -(-20 // width)
    length = 0.2 + (chunks - 1) * 0.05
    latency = out["latency_ms"]
    assert latency["ttft"]["mean"] == pytest.approx(200, rel=0.02)
    assert latency["itl_chunk"]["p99"] == pytest.approx(50, rel=0.02)
    assert latency["e2e"]["p50"] == pytest.approx(1e3 * length, rel=0.02)
    assert latency["tpot"]["mean"] == pytest.approx(1e3 * (length - 0.2) / (20 - width), rel=0.02)
    if 20 % width == 0:
        assert latency["tpot"]["mean"] == pytest.approx(50 / width, rel=0.02)
        assert latency["itl_token"]["p50"] == pytest.approx(50 / width, rel=0.02)
        assert latency["tokens_per_chunk"]["mean"] == pytest.approx(width)
    through = out["throughput"]
    assert through["output_tokens_per_second"] == pytest.approx(4 * 20 / length, rel=0.02)
    assert through["requests_per_second"] == pytest.approx(4 / length, rel=0.02)
    assert through["mean_in_flight"] == pytest.approx(4, rel=0.02)
    assert through["peak_in_flight"] == 4
    assert out["slo"]["attainment"] == 1.0
    assert out["tokens"]["completed"] == virtual.server.generated


def test_users_join_one_after_another_and_think(virtual: Virtual) -> None:
    records, begin = virtual.play(plan(Workload(think=(2.0, 2.0)), users=3, spawn_rate=0.5, run_time=5.0))
    firsts = sorted(record.intended - begin for record in records)
    assert firsts[:2] == pytest.approx([0.0, 2.0])
    assert sorted(record.started - record.intended for record in records)[-1] == pytest.approx(0.0, abs=1e-6)
    # The first user answers after 1.15 s, thinks 2 s and asks again.
    assert any(first == pytest.approx(3.15) for first in firsts)


def test_a_stall_of_five_seconds_shows_in_an_open_loop(virtual: Virtual) -> None:
    virtual.server.stall = (20.0, 25.0)
    records, begin = virtual.play(plan(open_loop=OpenLoop(8.0), run_time=60.0))
    out = summary(records, begin, begin + 60.0)
    assert out["requests"]["attempted"] == 480
    assert out["latency_ms"]["ttft"]["p99"] > 3500
    assert out["latency_ms"]["ttft"]["p50"] == pytest.approx(200, rel=0.02)
    # A share of 5 of 60 seconds of arrivals missed the objective, and those that were under way.
    assert 0.85 < out["slo"]["attainment"] < 0.92


def test_latency_counts_from_the_intended_time_when_the_client_holds_back(virtual: Virtual) -> None:
    """Rate 4, one at a time, 1.15 s each: the n-th waits for those before it."""
    steady = OpenLoop(4.0, None, float("inf"))
    records, begin = virtual.play(plan(open_loop=steady, run_time=5.0, max_in_flight=1))
    records = sorted(records, key=lambda record: record.intended)[:20]
    assert [record.intended - begin for record in records] == pytest.approx(
        [0.25 * n + 0.125 for n in range(20)]
    )
    waits = [record.queued for record in records]
    assert waits == pytest.approx([(1.15 - 0.25) * n for n in range(20)], abs=1e-6)
    assert [record.ttft for record in records] == pytest.approx([0.2 + wait for wait in waits])
    assert max(record.lag for record in records) < 1e-6


def test_goodput_is_over_attempted_requests(virtual: Virtual) -> None:
    virtual.server.refuse = lambda number: number % 4 == 3
    records, begin = virtual.play(plan(open_loop=OpenLoop(4.0), run_time=50.0))
    out = summary(records, begin, begin + 50.0)
    assert out["slo"]["attempted"] == 200
    assert out["slo"]["attainment"] == pytest.approx(0.75)
    assert out["slo"]["by_limit"] == pytest.approx({"ttft": 0.75, "tpot": 0.75})
    assert out["slo"]["goodput_requests_per_second"] == pytest.approx(3.0)
    assert out["errors"] == {"HTTP 503: overloaded_error": 50}


def test_a_user_whom_the_server_refused_waits_before_the_next_try(virtual: Virtual) -> None:
    virtual.server.refuse = lambda number: True
    records, _ = virtual.play(plan(users=1, run_time=9.5 * ERROR_PAUSE))
    assert len(records) == 10


def test_what_does_not_end_in_time_is_unfinished_and_not_good(virtual: Virtual) -> None:
    virtual.server.gap = 30.0
    records, begin = virtual.play(plan(users=2, run_time=5.0, drain=10.0))
    out = summary(records, begin, begin + 5.0)
    assert out["requests"]["unfinished"] == out["requests"]["attempted"] == 2
    assert out["slo"]["attainment"] == 0.0
    assert out["latency_ms"]["ttft"] is None


def test_cancelled_requests_are_nobodys_failure(virtual: Virtual) -> None:
    records, begin = virtual.play(plan(replace(WORK, cancel_share=0.5), users=4, run_time=60.0))
    out = summary(records, begin, begin + 60.0)
    cancelled = out["requests"]["cancelled"]
    assert cancelled > 40
    assert out["requests"]["attempted"] == out["requests"]["ok"]
    assert out["slo"]["attainment"] == 1.0
    cut_off = virtual.server.generated - out["tokens"]["completed"]
    assert 0 < out["tokens"]["cut_off"] <= cut_off


def test_so_many_requests_and_no_more(virtual: Virtual) -> None:
    records, _ = virtual.play(plan(users=3, requests=10))
    assert len(records) == 10
    assert all(record.ok for record in records)


def observed(virtual: Virtual, load: Plan, records: list[Record], begin: float) -> Window:
    return window_of(load, Observation(begin, 0.0, records, end=virtual.loop.time()))


@pytest.mark.parametrize(
    "load",
    [
        {"users": 4, "requests": 40, "run_time": 60.0},
        {"trace": tuple(Timed(0.1 * i, "x", None, 20) for i in range(40)), "run_time": 60.0},
    ],
)
def test_what_is_measured_ends_when_there_is_no_more_load(virtual: Virtual, load: dict[str, Any]) -> None:
    whole = plan(**load)
    records, begin = virtual.play(whole)
    assert len(records) == 40
    window = observed(virtual, whole, records, begin)
    assert begin < window.end == max(record.ended or 0.0 for record in records) < begin + 20.0


def test_a_timed_run_is_measured_to_its_end(virtual: Virtual) -> None:
    for load in (plan(users=2, run_time=10.0), plan(open_loop=OpenLoop(0.2), run_time=10.0)):
        records, begin = virtual.play(load)
        assert observed(virtual, load, records, begin).end == begin + 10.0


def test_so_many_arrivals_of_an_open_loop_are_whole_conversations(virtual: Virtual) -> None:
    prompts = (Prompt("chat", ("one", "two", "three")),)
    work = replace(WORK, prompts=prompts, turns=3)
    records, _ = virtual.play(plan(work, open_loop=OpenLoop(2.0, None, float("inf")), requests=10))
    assert len(records) == 30


def test_probes_are_kept_apart(virtual: Virtual) -> None:
    records, begin = virtual.play(plan(users=1, run_time=20.0, probe_rate=1.0))
    out = summary(records, begin, begin + 20.0)
    assert out["probes"]["requests"]["ok"] == 20
    assert out["probes"]["e2e_ms"]["p50"] == pytest.approx(200, rel=0.02)
    load = [record for record in records if record.kind == "load" and record.intended < begin + 20.0]
    assert out["requests"]["attempted"] == len(load)


def test_turns_send_the_conversation_so_far(virtual: Virtual) -> None:
    prompts = (Prompt("chat", ("one", "two")),)
    work = Workload(prompts=prompts, turns=3, system="Be brief.", output_tokens=Lengths("fixed", 2))
    virtual.play(plan(work, users=1, requests=3))
    first, second, third = (body["messages"] for body in virtual.server.bodies)
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
    assert second[:2] == first
    assert second[2]["content"] == "xx"
    assert third[: len(second)] == second
    assert [third[1]["content"], third[3]["content"]] == ["one", "two"]


def test_sessions_are_the_same_in_every_run_of_a_seed(virtual: Virtual) -> None:
    prompts = tuple(Prompt(f"d{place % 2}", (f"prompt {place}",)) for place in range(30))
    work = Workload(prompts=prompts, output_tokens=Lengths("uniform", 3, 9), seeded=True, shared_prefixes=2)

    def bodies(seed: int) -> list[Any]:
        virtual.server.bodies.clear()
        virtual.play(plan(work, open_loop=OpenLoop(5.0), run_time=6.0, seed=seed))
        return virtual.server.bodies[:30]

    one = bodies(1)
    virtual.server.prefill = 0.9  # another order of ends
    assert bodies(1) == one
    assert bodies(2) != one


def test_a_trace_is_sent_when_it_says(virtual: Virtual) -> None:
    trace = (Timed(0.5, "hello"), Timed(2.0, None, 1030, 3, (1, 2)), Timed(2.5, None, 700, 3, (1,)))
    records, begin = virtual.play(plan(trace=trace))
    assert [record.intended - begin for record in records] == pytest.approx([0.5, 2.0, 2.5])
    prompts = [body["messages"][0]["content"].split() for body in virtual.server.bodies]
    assert prompts[0] == ["hello"]
    assert [len(prompt) for prompt in prompts[1:]] == [1030, 700]
    assert prompts[1][:512] == prompts[2][:512]
    assert prompts[1][512:700] != prompts[2][512:]
    assert virtual.server.bodies[1]["max_tokens"] == 3


SCENARIO = """
from loadtest import User, constant_pacing, task

class Often(User):
    weight = 3
    wait_time = constant_pacing(2.0)

    async def on_start(self):
        self.count = 0

    @task(4)
    async def ask(self):
        self.count += 1
        reply = await self.chat("q", name="ask", max_tokens=5)
        assert reply.messages[-1] == {"role": "assistant", "content": "xxxxx"}

    @task
    async def both(self):
        await self.chat("a", name="first", max_tokens=2)
        await self.pause()
        await self.complete("b", name="second", max_tokens=2, cancel_after=1)

class Never(User):
    weight = 0

    @task
    async def bug(self):
        raise AssertionError
"""


def test_a_scenario_in_python(virtual: Virtual, tmp_path: Path) -> None:
    file = tmp_path / "scenario.py"
    file.write_text(SCENARIO)
    records, begin = virtual.play(plan(scenario=str(file), users=5, run_time=100.0))
    counts = {name: sum(record.name == name for record in records) for name in ("ask", "first", "second")}
    assert counts["ask"] / counts["first"] == pytest.approx(4.0, rel=0.4)
    assert counts["second"] == pytest.approx(counts["first"], abs=5)
    assert sum(counts.values()) == len(records)
    starts = sorted(record.intended - begin for record in records)
    assert starts[:5] == pytest.approx([0.0] * 5)
    assert len(records) == pytest.approx(5 * 50, rel=0.3)  # a task every two seconds


def test_fields_of_the_command_line_are_in_what_a_scenario_asks(virtual: Virtual, tmp_path: Path) -> None:
    file = tmp_path / "scenario.py"
    file.write_text(SCENARIO)
    work = replace(WORK, body={"temperature": 0.0, "max_tokens": 9})
    virtual.play(plan(work, scenario=str(file), users=1, run_time=10.0))
    assert {body["temperature"] for body in virtual.server.bodies} == {0.0}
    assert {body["max_tokens"] for body in virtual.server.bodies} <= {2, 5}  # what a task says comes first


def test_a_mistake_in_a_scenario_ends_the_run(virtual: Virtual, tmp_path: Path) -> None:
    file = tmp_path / "scenario.py"
    bug = (
        "from loadtest import User, task\nclass A(User):\n    @task\n    async def t(self):\n        1 / 0\n"
    )
    file.write_text(bug)
    with pytest.raises(ZeroDivisionError):
        virtual.play(plan(scenario=str(file), users=1, run_time=100.0))
    assert virtual.loop.time() < 1010.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import nothing_like_it", "ModuleNotFoundError"),
        ("x = 1", "no subclass"),
        ("from loadtest import User\nclass A(User): pass", "@task"),
        (
            "from loadtest import User, task\nclass A(User):\n    @task\n    async def chat(self): pass",
            "must not be called chat",
        ),
    ],
)
def test_scenarios_that_cannot_be(tmp_path: Path, text: str, message: str) -> None:
    from loadtest.scenario import load_scenario

    file = tmp_path / "scenario.py"
    file.write_text(text)
    with pytest.raises(ValueError, match=message):
        load_scenario(file)


@pytest.mark.parametrize("load", [{"users": 8}, {"open_loop": OpenLoop(8.0)}])
def test_the_load_is_kept_up_until_what_was_due_has_ended(virtual: Virtual, load: dict[str, Any]) -> None:
    """Else the last requests would have the server to themselves, and would flatter it."""
    virtual.server.gap = 0.5  # 9.7 s a request
    records, begin = virtual.play(plan(run_time=10.0, **load))
    due = [record for record in records if record.intended < begin + 10.0]
    assert all(record.ok for record in records)
    last = max(record.ended or 0.0 for record in due)
    for moment in (begin + 10.0, last - 0.1):
        assert sum(record.started <= moment < (record.ended or 0.0) for record in records) >= 8


@pytest.mark.parametrize(("rate", "falls_behind"), [(0.5, False), (3.0, True)])
def test_a_server_that_falls_behind_ends_the_rung(virtual: Virtual, rate: float, falls_behind: bool) -> None:
    """It answers one request at a time, in 1.15 s each."""
    virtual.server.room = asyncio.Semaphore(1)
    seen = Observation(virtual.loop.time() + 1.0, 0.0, ticks=[[]])

    def on_tick(tick: Tick) -> bool:
        seen.ticks[0].append(tick)
        seen.records = virtual.records
        return saturated(seen) is not None

    _, begin = virtual.play(plan(open_loop=OpenLoop(rate), run_time=60.0, drain=5.0), on_tick)
    last = seen.ticks[0][-1].time - begin
    assert (last < 40.0) == falls_behind
