"""JSON log lines: parseable whatever is logged, with request ids, and without what people wrote."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable

import pytest

from server.log_format import JsonFormatter
from tests.server.conftest import Served

SECRET = "the-words-of-a-person"


def lines(records: list[logging.LogRecord]) -> list[dict[str, object]]:
    texts = [JsonFormatter().format(record) for record in records]
    assert not any("\n" in text for text in texts)
    return [json.loads(text) for text in texts]


def test_requests_are_told_by_their_fields(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(log_format="json")
    with caplog.at_level(logging.INFO, "dspark.access"):
        served.complete_with({"X-Request-Id": "mine-1"})
        served.client.get("/no%0Awhere")
        served.client.get("/health")
    first, second = lines(caplog.records)
    assert first["request_id"] == "mine-1"
    assert (first["method"], first["path"], first["status"]) == ("POST", "/v1/completions", 200)
    assert first["logger"] == "dspark.access"
    assert str(first["time"]).endswith("+00:00")
    assert (second["status"], len(str(second["request_id"]))) == (404, 32)


def test_a_traceback_stays_on_its_line() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.makeLogRecord(
            {"msg": "it %s", "args": ("failed",), "levelno": 40, "levelname": "ERROR"}
        )
        record.exc_info = sys.exc_info()
    (line,) = lines([record])
    assert line["message"] == "it failed"
    assert line["level"] == "error"
    assert "ValueError: two\nlines" in str(line["exception"])


def test_what_people_write_is_never_logged(
    serve: Callable[..., Served], caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(log_format="json")
    bodies = [
        {"prompt": SECRET},
        {"prompt": SECRET, "stream": True},
        {"prompt": SECRET * 100, "max_tokens": 5},
        {"prompt": [SECRET, 3]},
        {"prompt": "a", SECRET: 1},
        {"prompt": "a", "stop": [SECRET]},
    ]
    with caplog.at_level(logging.DEBUG):
        for body in bodies:
            served.post("/v1/completions", body)
        served.chat(messages=[{"role": "user", "content": SECRET}])
        served.engine.fail_after = 10
        served.complete(prompt=SECRET)
        served.client.post("/v1/completions", content=SECRET, headers={"Content-Type": "application/json"})
    ours = [record for record in caplog.records if record.name.startswith("dspark")]
    assert len(ours) == len(bodies) + 3
    assert SECRET not in "".join(JsonFormatter().format(record) for record in ours)
