"""Limits of one key: told as OpenAI tells them, apart for each key, forgotten when they no longer matter."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from server import limits
from server.limits import KeyLimits
from server.metrics import Metrics
from tests.server.conftest import Served, wait_until

Serve = Callable[..., Served]


def key(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}"}


def test_requests_a_minute(serve: Serve) -> None:
    served = serve(key_rate_limit=3, api_key=["a", "b"])
    replies = [served.complete_with(key("a")) for _ in range(4)]
    assert [reply.status_code for reply in replies] == [200, 200, 200, 429]
    error = replies[3].json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "3 requests a minute" in error["message"]
    assert 15 <= int(replies[3].headers["retry-after"]) <= 20
    assert served.complete_with(key("b")).status_code == 200
    assert served.client.get("/v1/models", headers=key("a")).status_code == 200
    assert served.metrics.value("admission_rejections_total", reason="key_rate") == 1


def test_requests_at_once(serve: Serve) -> None:
    served = serve(key_concurrency_limit=2, api_key=["a", "b"])
    served.engine.step_time = 0.05
    statuses: list[int] = []
    threads = [
        threading.Thread(target=lambda: statuses.append(served.complete_with(key("a")).status_code))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(served.engine.active) == 2)
    refused = served.complete_with(key("a"))
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert served.complete_with(key("b")).status_code == 200
    for thread in threads:
        thread.join()
    assert statuses == [200, 200]
    assert served.complete_with(key("a")).status_code == 200


def test_a_wrong_key_does_not_use_up_anything(serve: Serve) -> None:
    served = serve(key_rate_limit=1, api_key=["right"])
    for _ in range(3):
        assert served.complete_with(key("wrong")).status_code == 401
    assert served.complete_with(key("right")).status_code == 200
    assert served.complete_with(key("right")).status_code == 429


def test_a_key_is_one_client_however_it_is_spelt(serve: Serve) -> None:
    served = serve(key_rate_limit=1, api_key=["k"])
    spellings = ("Bearer k", "bearer k", "BEARER  k", "Bearer   k")
    statuses = [served.complete_with({"Authorization": each}).status_code for each in spellings]
    assert statuses == [200, 429, 429, 429]


def test_where_no_keys_are_checked_an_invented_one_is_no_client(serve: Serve) -> None:
    served = serve(key_rate_limit=2)
    assert [served.complete_with(key(name)).status_code for name in "abc"] == [200, 200, 429]


class Asked:
    """A limited application, asked without a server, by a clock that the test sets."""

    def __init__(self, rate: float, concurrency: int = 0) -> None:
        self.now = 0.0
        self.passed = 0
        self.limits = KeyLimits(self._pass, Metrics("", "m"), rate, concurrency, clock=lambda: self.now)

    async def _pass(self, *_: Any) -> None:
        self.passed += 1

    async def ask(self, client: str) -> bool:
        async def send(message: Any) -> None:
            pass

        before = self.passed
        scope = {"type": "http", "method": "POST", "headers": [], "client": (client, 1)}
        await self.limits(scope, send, send)  # type: ignore[arg-type]
        return self.passed > before


async def test_allowance_grows_with_time_up_to_a_minutes_worth() -> None:
    asked = Asked(rate=6)
    assert [await asked.ask("a") for _ in range(7)] == [True] * 6 + [False]
    asked.now += 9.9
    assert not await asked.ask("a")
    asked.now += 0.2
    assert [await asked.ask("a") for _ in range(2)] == [True, False]
    asked.now += 10_000
    assert [await asked.ask("a") for _ in range(7)] == [True] * 6 + [False]


async def test_less_than_one_a_minute() -> None:
    asked = Asked(rate=0.5)
    assert await asked.ask("a")
    asked.now += 119
    assert not await asked.ask("a")
    asked.now += 2
    assert await asked.ask("a")


async def test_clients_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_REMEMBERED", 10)
    asked = Asked(rate=60)
    for number in range(1000):
        assert await asked.ask(f"client {number}")
        asked.now += 0.5
    assert len(asked.limits._accounts) <= 11
