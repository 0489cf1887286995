"""Requests generated from our own OpenAPI document: the server keeps what it says there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Served

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_requests_made_from_the_document(served: Served) -> None:
    schemathesis = pytest.importorskip("schemathesis", reason="comes with the extra 'contract'")
    from hypothesis import HealthCheck, Phase, given, settings

    document = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    statuses: dict[str, set[int]] = {}
    for result in document.get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )  # fmt: skip
        @given(case=operation.as_strategy())
        def check(case: Any) -> None:
            reply = case.call(base_url=served.url)
            statuses.setdefault(case.operation.label, set()).add(reply.status_code)
            assert reply.status_code == 200 or 400 <= reply.status_code < 500, reply.text
            assert len(reply.content) < 10_000 or reply.status_code == 200

        check()
        assert served.complete().status_code == 200
    assert "POST /v1/completions" in statuses
    assert all(200 in seen for label, seen in statuses.items() if label.startswith("POST ")), statuses
