"""Real Ray Serve with two replicas of the fake engine: streams pass through, load makes replicas."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.deploy.replicas import free_port, until

ray = pytest.importorskip("ray", reason="ray is not installed (requirements/ray.txt)")
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

LONG = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}  # two seconds of the fake engine


def fake_engine(settings: Any, observer: Any, progress: Any) -> Any:
    from tests.server.fake import FakeEngine

    engine = FakeEngine(observer)
    engine.step_time = 0.05
    return engine


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    from ray import serve

    from deploy.ray.app import build

    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        # On a busy machine Ray's own proxy does not come up in the five seconds that it gives it.
        patch.setenv("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        arguments = {"model": "fake", "max_num_seqs": "4", "max_replicas": "2", "threads": "1"}
        serve.run(build(arguments, fake_engine))
        yield f"http://127.0.0.1:{port}"
        serve.shutdown()
        ray.shutdown()


def replicas() -> int:
    from ray import serve

    (deployment,) = serve.status().applications["default"].deployments.values()
    return deployment.replica_states.get("RUNNING", 0)


def test_streams_pass_through(url: str) -> None:
    arrivals: list[float] = []
    text = ""
    begun = time.monotonic()
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}, timeout=30) as reply:
        assert reply.status_code == 200
        for piece in reply.iter_text():
            arrivals.append(time.monotonic() - begun)
            text += piece
    assert text.endswith("data: [DONE]\n\n")
    assert len(arrivals) > 20
    assert arrivals[0] < arrivals[-1] - 1


def test_errors_and_whole_replies_are_the_servers_own(url: str) -> None:
    reply = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "temperature": -1})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "temperature")
    assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).json()["usage"]["prompt_tokens"] == 2
    assert httpx.get(f"{url}/ready").json() == {"status": "ready"}


def test_load_brings_a_second_replica_and_loses_nothing(url: str) -> None:
    assert replicas() == 1
    stop = threading.Event()
    failures: list[str] = []
    answered = [0] * 16

    def ask(number: int) -> None:
        while not stop.is_set():
            reply = httpx.post(f"{url}/v1/completions", json=LONG, timeout=60)
            if reply.status_code == 200:
                answered[number] += 1
            else:
                failures.append(reply.text)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    try:
        until(lambda: replicas() == 2, 240)
        time.sleep(5)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert min(answered) >= 1
