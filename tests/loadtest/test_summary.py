from __future__ import annotations

import pytest

from loadtest.generator import Tick
from loadtest.health import client_health
from loadtest.record import Outcome, Record
from loadtest.run import reconcile
from loadtest.slo import Slo
from loadtest.summary import Window, summarize, throughput


def record(
    intended: float, ttft: float = 0.1, tokens: int = 5, gap: float = 0.02, outcome: Outcome = "ok"
) -> Record:
    times = [intended + ttft + gap * place for place in range(tokens)]
    return Record(
        "x",
        intended=intended,
        started=intended,
        first_text=times[0] if times else None,
        times=times,
        counts=list(range(1, tokens + 1)),
        ended=(times[-1] if times else intended) + 0.001,
        outcome=outcome,
        error="broken" if outcome == "error" else None,
        finish_reason="stop",
        completion_tokens=tokens,
    )


@pytest.mark.parametrize(
    "words", [["ttft"], ["ttft:x"], ["ttft:-1"], ["ttft:nan"], ["speed:3"], ["ttft:1", "ttft:2"]]
)
def test_bad_objectives_are_refused(words: list[str]) -> None:
    with pytest.raises(ValueError, match="--slo"):
        Slo.parse(words)


def test_a_single_token_keeps_any_time_per_token() -> None:
    slo = Slo.parse(["ttft:200", "tpot:10"])
    assert slo.good(record(0.0, tokens=1))
    assert not slo.good(record(0.0, tokens=5))
    assert not slo.good(record(0.0, tokens=1, outcome="error"))
    assert str(slo) == "ttft:200 tpot:10"


def test_warm_up_and_cool_down_are_cut_off() -> None:
    records = [record(float(time)) for time in range(10)] + [record(2.5, outcome="error")]
    out = summarize(records, Window(2.0, 8.0), Slo.parse(["ttft:200"]))
    assert out["requests"]["attempted"] == 7
    assert out["slo"]["attainment"] == pytest.approx(6 / 7)
    assert out["slo"]["goodput_requests_per_second"] == pytest.approx(1.0)
    assert out["throughput"]["requests_per_second"] == pytest.approx(1.0)
    assert out["throughput"]["output_tokens_per_second"] == pytest.approx(35 / 6, rel=1e-6)


def test_tokens_count_when_they_come_whichever_request_they_belong_to() -> None:
    long = record(0.0, ttft=0.05, tokens=1000, gap=0.1)
    out = throughput([long], Window(10.0, 20.0))
    assert out["output_tokens_per_second"] == pytest.approx(10.0, rel=0.02)
    assert out["requests_per_second"] == 0.0


def test_percentiles_that_the_sample_cannot_support_are_marked() -> None:
    out = summarize([record(float(time)) for time in range(40)], Window(0.0, 100.0), None)
    ttft = out["latency_ms"]["ttft"]
    assert ttft["unsupported"] == ["p95", "p99"]
    assert ttft["margin"] == pytest.approx(0.0, abs=1e-6)
    assert "margin" not in out["latency_ms"]["itl_chunk"]


def test_nothing_measured_is_no_crash() -> None:
    out = summarize([], Window(0.0, 0.0), Slo.parse(["ttft:1"]))
    assert out["slo"]["attainment"] is None
    assert out["latency_ms"]["ttft"] is None
    assert out["throughput"]["output_tokens_per_second"] == 0.0


def health(records: list[Record], lag: float = 0.0, cpu: float = 0.1) -> list[str]:
    ticks = [[Tick(float(time), 1, 1, 1, lag) for time in range(10)]]
    reasons: list[str] = client_health(records, ticks, [10 * cpu], 10.0, Window(0.0, 10.0), True)["degraded"]
    return reasons


def test_degraded_runs_say_why() -> None:
    fine = [record(place / 10) for place in range(100)]
    assert health(fine) == []
    assert "late" in health(fine, lag=0.3)[0]
    assert "--processes" in health(fine, cpu=0.95)[0]
    late = [record(place / 10) for place in range(100)]
    for each in late:
        each.started += 0.5
    assert "sent 500 ms late" in health(late)[0]
    for each in late:
        each.queued = 0.5
    assert health(late)[0].startswith("requests waited 500 ms for --max-in-flight")
    for each in late:
        each.started += 6.0
    assert any("were sent in time" in reason for reason in health(late))


@pytest.mark.parametrize(
    ("generated", "completed", "cut_off", "agree"),
    [(100, 100, 0, True), (101, 100, 0, False), (120, 100, 15, True), (110, 100, 15, False)],
)
def test_server_and_client_are_reconciled(generated: int, completed: int, cut_off: int, agree: bool) -> None:
    out = reconcile({"generated": generated}, {"completed": completed, "cut_off": cut_off})
    assert out["agree"] is agree
    assert out["server_generated_for_cut_off"] == generated - completed
    assert reconcile(None, {"completed": 1, "cut_off": 0}) == {}
