"""What one API key may ask for: so many requests a minute, so many at once. The others wait for nobody."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.auth import GUARDED, bearer_token
from server.errors import too_many
from server.metrics import Metrics

#: clients that are remembered before those that could be forgotten are
_REMEMBERED = 10_000


@dataclass(slots=True)
class _Account:
    allowance: float  # requests that may come now
    seen: float
    running: int = 0


class KeyLimits:
    """ASGI middleware before the API, and behind the key check if there is one.

    A client is its key, where keys are checked; else it is an address, since anybody can invent a token.
    `rate`: requests a minute, which may all come at once; `concurrency`: requests under way. 0: no limit.
    """

    def __init__(
        self,
        app: ASGIApp,
        metrics: Metrics,
        rate: float,
        concurrency: int,
        keyed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._rate = rate
        self._concurrency = concurrency
        self._keyed = keyed
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        account = self._account(self._client(scope))
        if self._concurrency and account.running >= self._concurrency:
            self._metrics.rejected("key_concurrency")
            error = too_many(f"Your key may have {self._concurrency} requests under way at once.", 1.0)
            await error.response()(scope, receive, send)
            return
        if self._rate and account.allowance < 1:
            self._metrics.rejected("key_rate")
            wait = (1 - account.allowance) * 60 / self._rate
            error = too_many(f"Your key may send {self._rate:g} requests a minute.", wait)
            await error.response()(scope, receive, send)
            return
        if self._rate:
            account.allowance -= 1
        account.running += 1
        try:
            await self._app(scope, receive, send)
        finally:
            account.running -= 1

    def _client(self, scope: Scope) -> str:
        if self._keyed and scope["path"].startswith(GUARDED):
            return hashlib.sha256(bearer_token(Headers(scope=scope)).encode()).hexdigest()
        return (scope.get("client") or ("",))[0]

    def _account(self, client: str) -> _Account:
        now = self._clock()
        account = self._accounts.get(client)
        if account is None:
            if len(self._accounts) >= _REMEMBERED:
                self._forget(now)
            account = self._accounts[client] = _Account(max(1.0, self._rate), now)
        account.allowance = self._grown(account, now)
        account.seen = now
        return account

    def _grown(self, account: _Account, now: float) -> float:
        return min(max(1.0, self._rate), account.allowance + (now - account.seen) * self._rate / 60)

    def _forget(self, now: float) -> None:
        """Drop those whose account would be a fresh one's again."""
        fresh = max(1.0, self._rate)
        self._accounts = {
            client: account
            for client, account in self._accounts.items()
            if account.running or self._grown(account, now) < fresh
        }
