"""A server over a real socket, in a thread of its own, with the fake engine behind it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
import uvloop

from server.app import create_app
from server.context import ServerContext
from server.debug import MOST
from server.metrics import Metrics
from server.process import HttpServer
from server.settings import Settings
from server.startup import bind
from tests.server.fake import FakeEngine


class Served:
    """A running server; `engine` may be changed between requests."""

    def __init__(
        self, settings: Settings, make_engine: Callable[[Metrics], Any] = FakeEngine, tracer: Any = None
    ) -> None:
        self.settings = settings
        self.listener = bind("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        keep = MOST if settings.enable_debug_endpoints or tracer else 0
        self.metrics = Metrics(settings.metrics_prefix, settings.model_names[0], keep)
        self.context = ServerContext(settings, self.metrics)
        self.context.tracer = tracer
        self.engine = make_engine(self.metrics)
        self.server = HttpServer(create_app(self.context), settings)
        self.loop = uvloop.new_event_loop()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started)
        self.client = httpx.Client(base_url=self.url, timeout=10)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=10)

    def _run(self) -> None:
        self.context.engine = self.engine  # type: ignore[assignment]
        self.loop.run_until_complete(self.engine.start())
        self.loop.run_until_complete(self.server.serve(sockets=[self.listener]))
        self.loop.run_until_complete(self.engine.drain(0))

    def call(self, coroutine: Any) -> Any:
        """Run `coroutine` on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.client.post(path, json=body, **kwargs)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": "hi", "max_tokens": 400} | fields)

    def complete_with(self, headers: dict[str, str]) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": "hi"}, headers=headers)

    def chat(self, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]} | fields)

    def close(self) -> None:
        self.client.close()
        self.openai.close()
        self.server.should_exit = True
        self.thread.join(10)
        self.context.close()
        self.loop.close()


def wait_until(condition: Callable[[], Any], timeout: float = 5.0) -> None:
    """Poll until `condition` holds; fail after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


@pytest.fixture(scope="session")
def _shared() -> Iterator[Served]:
    served = Served(Settings(model="fake-model", served_model_name=["fake-model", "alias/of-it"]))
    yield served
    served.close()


@pytest.fixture
def served(_shared: Served) -> Iterator[Served]:
    """The server that most tests share, with a fresh fake."""
    _shared.engine.reset()
    yield _shared
    _shared.engine.reset()
    wait_until(lambda: not _shared.engine.active)


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Starts servers with settings of their own."""
    started: list[Served] = []

    def start(tracer: Any = None, **settings: Any) -> Served:
        started.append(Served(Settings(**({"model": "fake-model"} | settings)), tracer=tracer))
        return started[-1]

    yield start
    for served in started:
        served.close()


@pytest.fixture(scope="module")
def _roomy() -> Iterator[Served]:
    served = Served(Settings(model="fake-model"))
    served.engine.max_model_len = 8192
    yield served
    served.close()


@pytest.fixture
def roomy(_roomy: Served) -> Served:
    """A server for this module, with room for tools that are explained to it a byte a token."""
    _roomy.engine.reset()
    _roomy.context.__dict__.pop("ways", None)
    return _roomy
