"""The worker's tools are handed in: how rows are verified, and by which clock parts are timed."""

from __future__ import annotations

from engine.batch import Verdict
from engine.laps import HostLaps
from engine.worker import Worker
from tests.engine.harness import Engine, babbler, tiny


def test_verification_and_clock_are_handed_in():
    engine = Engine(tiny(), babbler(), "fixed:2")
    marks: list[str] = []

    class Laps:
        def lap(self) -> None:
            marks.append("lap")

        def seconds(self) -> list[float]:
            return [1.0, 2.0, 4.0]

    def verify(items, logits):
        marks.append("verify")
        return [Verdict((3,)) for _ in items]

    engine.worker = Worker(engine.executor, engine.worker.drafter, verify, Laps)
    engine.add("a", [5, 6], max_tokens=5)
    batch = engine.loop.begin()
    result = engine.worker.run(batch)
    assert (result.forward_time, result.verify_time, result.draft_time) == (1.0, 2.0, 4.0)
    assert result.verdicts == (Verdict((3,)),)
    assert marks == ["lap", "lap", "verify", "lap", "lap"]


def test_the_hosts_clock_times_what_lies_between():
    laps = HostLaps()
    assert laps.seconds() == []
    for _ in range(4):
        laps.lap()
    assert len(laps.seconds()) == 3
    assert min(laps.seconds()) >= 0.0
