"""The exposition: names that dashboards know, values that add up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from engine.outputs import EngineGauges, EngineObserver, RequestStats, StepStats, Usage
from server.metrics import Metrics
from tests.server.conftest import Served

NAMES = [
    "request_success_total", "prompt_tokens_total", "prompt_tokens_cached_total",
    "generation_tokens_total", "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
    "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total",
    "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket", "request_queue_time_seconds_bucket",
    "spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total", "spec_decode_num_accepted_tokens_per_pos_total",
    "corrupted_requests_total", "admission_rejections_total", "http_requests_total",
    "step_seconds_bucket", "forward_seconds_bucket", "draft_seconds_bucket",
    "step_rows_bucket", "verify_length_bucket", "accepted_length_bucket",
    "spec_decode_num_proposed_tokens_total", "spec_decode_num_slots_total",
    "spec_decode_expected_accepted_tokens_total", "spec_decode_steps_without_draft_total",
    "spec_decode_calibration_error", "spec_decode_collapsed", "verify_capacity", "steps_per_second",
    "forecast_tokens_total", "forecast_seconds_total", "forecast_measured_tokens_total",
    "forecast_measured_seconds_total",
    "kv_pages_free", "kv_pages_cached", "kv_pages_total", "cancelled_requests_total", "step_age_seconds",
]  # fmt: skip


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("dspark:", "m")


def step(
    verified: tuple[int, ...], accepted: tuple[int, ...], emitted: int = 0, corrupted: int = 0
) -> StepStats:
    return StepStats(0.02, 0.01, 0.001, 40, 30, 3, emitted, verified, accepted, corrupted)


def test_speculation(metrics: Metrics) -> None:
    observer: EngineObserver = metrics
    observer.step(step((3, 0, 4), (2, 0, 4), emitted=9))
    observer.step(step((2,), (0,), emitted=1, corrupted=1))
    assert metrics.value("spec_decode_num_drafts_total") == 3
    assert metrics.value("spec_decode_num_draft_tokens_total") == 9
    assert metrics.value("spec_decode_num_accepted_tokens_total") == 6
    per_position = [
        metrics.value("spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(5)
    ]
    assert per_position == [2, 2, 1, 1, 0]
    assert metrics.value("verify_length_count") == 4
    assert metrics.value("verify_length_bucket", le="0.0") == 1
    assert metrics.value("accepted_length_count") == 3
    assert metrics.value("accepted_length_sum") == 9
    assert metrics.value("generation_tokens_total") == 10
    assert metrics.value("corrupted_requests_total") == 1
    assert metrics.value("step_seconds_count") == 2
    assert metrics.value("step_rows_sum") == 80


def test_what_was_foreseen_stands_beside_what_came(metrics: Metrics) -> None:
    foreseen = replace(
        step((3, 0), (2, 0), emitted=4), waiting=(5, 0), expected=(1.5, 0.0), slots=(4, 0, 2), capacity=90,
        forecast_tokens=3.5, forecast_time=0.025, decided=5,
    )  # fmt: skip
    metrics.step(foreseen)
    metrics.step(step((0,), (0,), emitted=1))  # of which nothing was foreseen
    metrics.step(replace(foreseen, undrafted="does_not_pay", slots=(0,)))
    metrics.gauges(EngineGauges(calibration_errors=(("greedy", 0.03),), collapsed=True))
    assert metrics.value("spec_decode_num_proposed_tokens_total") == 10
    assert metrics.value("spec_decode_expected_accepted_tokens_total") == 3.0
    assert metrics.value("spec_decode_num_slots_total") == 6
    assert metrics.value("verify_capacity") == 90
    assert metrics.value("steps_per_second") == pytest.approx(40.0)
    assert metrics.value("forecast_tokens_total") == 7.0
    assert metrics.value("forecast_seconds_total") == pytest.approx(0.05)
    assert metrics.value("forecast_measured_tokens_total") == 10
    assert metrics.value("forecast_measured_seconds_total") == pytest.approx(0.04)
    assert metrics.value("spec_decode_steps_without_draft_total", reason="does_not_pay") == 1
    assert metrics.value("spec_decode_calibration_error", regime="greedy") == 0.03
    assert metrics.value("spec_decode_collapsed") == 1
    metrics.gauges(EngineGauges())
    assert metrics.value("spec_decode_collapsed") == 0


def test_requests(metrics: Metrics) -> None:
    usage = Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=3)
    metrics.finished(RequestStats("stop", 0.002, 0.05, 0.3, usage, 0))
    metrics.finished(RequestStats("abort", 0.002, None, 0.3, usage, 0))
    metrics.first_token(0.004)
    metrics.prefix_cache(10, 4)
    metrics.preempted()
    assert metrics.value("request_success_total", finished_reason="stop") == 1
    assert metrics.value("request_success_total", finished_reason="abort") == 1
    assert metrics.value("prompt_tokens_total") == 20
    assert metrics.value("prompt_tokens_cached_total") == 8
    assert metrics.value("time_to_first_token_seconds_bucket", le="0.003") == 0
    assert metrics.value("time_to_first_token_seconds_bucket", le="0.005") == 1
    assert metrics.value("prefix_cache_hits_total") == 4
    assert metrics.value("num_preemptions_total") == 1


def test_tokens_that_arrive_together_share_the_gap(metrics: Metrics) -> None:
    metrics.inter_token(0.04, 4)
    metrics.inter_token(0.03, 1)
    assert metrics.value("inter_token_latency_seconds_count") == 5
    assert metrics.value("inter_token_latency_seconds_sum") == pytest.approx(0.07)
    assert metrics.value("inter_token_latency_seconds_bucket", le="0.01") == 4
    assert metrics.value("inter_token_latency_seconds_bucket", le="+Inf") == 5


def test_gauges(metrics: Metrics) -> None:
    metrics.gauges(EngineGauges(1, 2, 3, 0.5, 6, 7, 8))
    names = "num_requests_running num_requests_waiting num_tokens_waiting kv_cache_usage_perc"
    names += " kv_pages_free kv_pages_cached kv_pages_total"
    assert [metrics.value(name) for name in names.split()] == [1, 2, 3, 0.5, 6, 7, 8]


@pytest.mark.parametrize("prefix", ["dspark:", "vllm:", ""])
def test_prefix(prefix: str) -> None:
    text = Metrics(prefix, "m").exposition("")[0].decode()
    assert f"\n{prefix}num_requests_running{{" in text


def test_scrape(served: Served) -> None:
    assert served.complete().status_code == 200
    served.client.get("/nowhere/x")
    reply = served.client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain")
    samples = [sample for family in text_string_to_metric_families(reply.text) for sample in family.samples]
    names = {sample.name for sample in samples}
    missing = [name for name in NAMES if f"dspark:{name}" not in names]
    # A label that nothing has been counted under yet has no sample.
    assert set(missing) <= {
        "admission_rejections_total", "spec_decode_calibration_error",
        "spec_decode_steps_without_draft_total",
    }  # fmt: skip
    ours = [sample for sample in samples if sample.name.startswith("dspark:")]
    assert all(sample.labels["model_name"] == "fake-model" for sample in ours)
    assert not any(name.endswith("_created") for name in names)
    paths = {sample.labels["path"] for sample in ours if sample.name == "dspark:http_requests_total"}
    assert {"/v1/completions", "other"} <= paths
    assert next(sample.value for sample in ours if sample.name == "dspark:kv_cache_usage_perc") == 0.25


def test_openmetrics(served: Served) -> None:
    reply = served.client.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert list(parse_openmetrics(reply.text))
    assert "dspark:num_requests_running{" in reply.text, "Prometheus 2 asks like this"


def test_a_step_that_hangs_is_seen(served: Served) -> None:
    served.engine.age = 42.5
    assert '\ndspark:step_age_seconds{model_name="fake-model"} 42.5\n' in served.client.get("/metrics").text
