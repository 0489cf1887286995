"""What an operator is shown on request: the scheduler's last steps, and a reply's own figures."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.outputs import RequestStats, StepStats, Usage
from server.debug import MOST
from server.request_metrics import metrics_json
from tests.server.conftest import Served

Serve = Callable[..., Served]


def test_the_scheduler_is_not_shown_unless_that_was_asked_for(served: Served) -> None:
    assert served.client.get("/debug/scheduler").status_code == 404


def test_the_last_steps_are_shown(serve: Serve) -> None:
    served = serve(enable_debug_endpoints=True)
    for rows in range(MOST + 40):
        served.metrics.step(StepStats(0.02, 0.01, 0.0, rows, 0, 1, 1, (2,), (1,)))
    reply = served.client.get("/debug/scheduler", params={"last": 3}).json()
    assert reply["policy"] == "off"
    assert [step["rows"] for step in reply["steps"]] == [MOST + 37, MOST + 38, MOST + 39]
    assert reply["steps"][0]["verified"] == [2]
    assert len(served.client.get("/debug/scheduler").json()["steps"]) == 32
    for wrong in (0, MOST + 1, "x"):
        answer = served.client.get("/debug/scheduler", params={"last": wrong})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "last"


def test_replies_carry_no_metrics_unless_that_was_asked_for(served: Served) -> None:
    assert "metrics" not in served.complete().json()
    assert "metrics" not in served.chat().json()


def test_replies_tell_how_their_drafts_fared(serve: Serve) -> None:
    served = serve(per_request_spec_decode_metrics="detailed", enable_per_request_metrics=True)
    for reply in (served.complete(), served.chat()):
        metrics = reply.json()["metrics"]
        assert metrics["time_to_first_token_ms"] == 100.0
        assert metrics["speculative_decoding"]["per_step_accepted"] == [4, 0, 3]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    lines = [line for line in served.complete(**options).text.splitlines() if '"metrics"' in line]
    assert len(lines) == 1
    assert '"usage":{' in lines[0]
    assert "metrics" not in served.complete(stream=True).text


FIRST = RequestStats(None, 0.01, 0.1, 0.5, Usage(completion_tokens=9), 0, (5, 5, 3), (4, 0, 3))
SECOND = RequestStats(None, 0.02, 0.2, 0.6, Usage(completion_tokens=5), 0, (2,), (1,))


def test_figures_of_one_request() -> None:
    assert metrics_json([FIRST], True, "detailed") == {
        "time_to_first_token_ms": 100.0,
        "generation_time_ms": 400.0,
        "queue_time_ms": 10.0,
        "mean_itl_ms": 50.0,
        "tokens_per_second": 18.0,
        "speculative_decoding": {
            "mean_acceptance_length": pytest.approx(1 + 7 / 3, abs=1e-4),
            "draft_acceptance_rate": pytest.approx(7 / 13, abs=1e-4),
            "acceptance_histogram": [1, 0, 0, 1, 1, 0],
            "num_spec_steps": 3,
            "num_accepted_draft_tokens": 7,
            "num_draft_tokens": 13,
            "per_step_accepted": [4, 0, 3],
            "per_step_drafted": [5, 5, 3],
        },
    }


def test_figures_of_several_prompts_are_taken_together() -> None:
    both = metrics_json([FIRST, SECOND], True, "summary")
    assert (both["time_to_first_token_ms"], both["queue_time_ms"]) == (100.0, 20.0)
    assert both["generation_time_ms"] == 500.0
    assert both["mean_itl_ms"] == 75.0
    assert both["speculative_decoding"]["num_draft_tokens"] == 15
    assert "per_step_accepted" not in both["speculative_decoding"]


def test_several_choices_run_side_by_side() -> None:
    two = RequestStats(None, 0.0, 0.1, 1.1, Usage(completion_tokens=22), 0, choices=2)
    assert metrics_json([two], True, "none")["mean_itl_ms"] == 100.0


def test_nothing_to_tell_is_null() -> None:
    none = metrics_json([RequestStats(None, 0.1, None, 0.3, Usage(), 0)], True, "summary")
    assert none["time_to_first_token_ms"] is none["mean_itl_ms"] is none["tokens_per_second"] is None
    assert none["speculative_decoding"]["mean_acceptance_length"] is None
    assert none["speculative_decoding"]["acceptance_histogram"] == [0]
