"""nginx as shipped, before real server processes: streams, drains, kills, restarts, affinity."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.deploy.replicas import NGINX, Balancer, Clients, Replica, until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(NGINX is None, reason="nginx is not installed (Debian: nginx-light)"),
]

LONG = {"prompt": "a", "max_tokens": 200, "ignore_eos": True}  # two seconds of the fake engine


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[Replica]]:
    started = [Replica(tmp_path / f"replica-{number}.log") for number in (1, 2)]
    yield started
    for replica in started:
        replica.close()


Start = Callable[..., Balancer]


@pytest.fixture
def start(tmp_path: Path, replicas: list[Replica]) -> Iterator[Start]:
    started: list[Balancer] = []

    def start(conf: str = "nginx.conf", **options: Any) -> Balancer:
        started.append(Balancer(tmp_path / f"nginx-{len(started)}", replicas, conf, **options))
        return started[-1]

    yield start
    for balancer in started:
        balancer.close()


def complete(url: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 5} | fields, timeout=30)


def side_by_side(count: int, work: Callable[[int], Any]) -> tuple[list[threading.Thread], list[Any]]:
    """Threads under way, and a list into which each puts its result."""
    results: list[Any] = [None] * count

    def run(number: int) -> None:
        results[number] = work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    return threads, results


def test_streams_arrive_as_they_are_written(start: Start) -> None:
    url = start().url
    arrivals: list[float] = []
    begun = time.monotonic()
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG | {"stream": True}, timeout=30) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        for _ in reply.iter_raw():
            arrivals.append(time.monotonic() - begun)
    assert arrivals[-1] - arrivals[0] > 1.5
    assert len(arrivals) > 20, "steps were gathered on the way"
    assert max(later - earlier for earlier, later in pairwise(arrivals)) < 1.0


def test_requests_go_where_fewest_are_under_way(start: Start, replicas: list[Replica]) -> None:
    url = start().url
    threads, results = side_by_side(8, lambda _: complete(url, **LONG).status_code)
    until(lambda: sum(each.count("num_requests_running") for each in replicas) == 8)
    assert [each.count("num_requests_running") for each in replicas] == [4, 4]
    for thread in threads:
        thread.join()
    assert results == [200] * 8


def test_a_replica_that_leaves_loses_no_request(start: Start, replicas: list[Replica]) -> None:
    clients = Clients(start().url, 8)
    time.sleep(1.5)
    replicas[0].signal(signal.SIGTERM)
    assert replicas[0].exit_code() == 0
    time.sleep(1.5)
    clients.finish()
    assert clients.failures == []
    assert clients.answered > 30
    assert replicas[1].count("request_success_total") > 15


def test_a_rolling_restart_under_load_loses_no_request(start: Start, replicas: list[Replica]) -> None:
    clients = Clients(start().url, 6)
    for replica in replicas:
        time.sleep(1.0)
        replica.signal(signal.SIGTERM)
        assert replica.exit_code() == 0
        replica.start()
        deadline = time.monotonic() + 30.0
        while not replica.count("request_success_total"):  # until the balancer asks it again
            assert time.monotonic() < deadline
            time.sleep(0.2)
    clients.finish()
    assert clients.failures == []
    assert clients.answered > 50


def test_a_killed_replica_costs_its_own_streams_only(start: Start, replicas: list[Replica]) -> None:
    url = start().url
    begun = threading.Barrier(9)

    def stream(number: int) -> str:
        text, waiting = "", True
        try:
            with httpx.stream(
                "POST", f"{url}/v1/completions", json=LONG | {"stream": True}, timeout=30
            ) as reply:
                for piece in reply.iter_text():
                    text += piece
                    if waiting:
                        begun.wait()
                        waiting = False
        except httpx.HTTPError:
            return "broken"
        return "whole" if text.endswith("data: [DONE]\n\n") else "broken"

    threads, results = side_by_side(8, stream)
    begun.wait()
    lost = int(replicas[0].count("num_requests_running"))
    assert lost == 4
    replicas[0].signal(signal.SIGKILL)
    assert [complete(url).status_code for _ in range(10)] == [200] * 10
    for thread in threads:
        thread.join()
    assert results.count("broken") == lost
    assert results.count("whole") == 8 - lost


def test_what_a_killed_replica_had_begun_is_not_sent_again(start: Start, replicas: list[Replica]) -> None:
    url = start().url
    threads, replies = side_by_side(6, lambda _: complete(url, **LONG))
    until(lambda: [each.count("num_requests_running") for each in replicas] == [3, 3])
    replicas[0].signal(signal.SIGKILL)
    for thread in threads:
        thread.join()
    lost = [reply for reply in replies if reply.status_code != 200]
    assert len(lost) == 3
    for reply in lost:
        assert reply.status_code == 502
        assert reply.json()["error"]["code"] == "replica_lost"
    assert replicas[1].count("request_success_total") == 3


def test_without_any_replica_clients_are_told_to_come_back(start: Start, replicas: list[Replica]) -> None:
    url = start().url
    for replica in replicas:
        replica.signal(signal.SIGKILL)
        replica.exit_code()
    for _ in range(3):
        reply = complete(url)
        assert reply.status_code == 503
        assert reply.headers["retry-after"] == "2"
        assert reply.json()["error"]["code"] == "no_replica"
    replicas[1].start()
    until(lambda: complete(url).status_code == 200, 5)


def test_errors_of_the_replicas_pass_through(start: Start) -> None:
    url = start().url
    reply = complete(url, temperature=-1)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "temperature"
    assert complete(url, prompt="a" * 5_000_000).status_code == 413
    assert httpx.get(f"{url}/ready").json() == {"status": "ready"}
    for path in ("/metrics", "/debug/scheduler"):
        assert httpx.get(url + path).status_code == 404


def served(replicas: list[Replica]) -> list[float]:
    return [replica.count("request_success_total") for replica in replicas]


def test_a_session_stays_on_its_replica(start: Start, replicas: list[Replica]) -> None:
    url = start("affinity.conf").url

    def ask(session: str) -> list[float]:
        before = served(replicas)
        headers = {"X-Session-Id": session}
        body = {"prompt": "a", "max_tokens": 1}
        for _ in range(3):
            assert httpx.post(f"{url}/v1/completions", json=body, headers=headers).status_code == 200
        return [after - first for after, first in zip(served(replicas), before, strict=True)]

    shares = [ask(f"session {number}") for number in range(12)]
    assert all(sorted(share) == [0, 3] for share in shares)
    assert {share.index(3) for share in shares} == {0, 1}


def test_conversations_that_begin_alike_go_to_one_replica(start: Start, replicas: list[Replica]) -> None:
    url = start("affinity.conf").url

    def ask(system: str, words: str) -> int:
        before = served(replicas)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": words}]
        body = {"messages": messages, "max_tokens": 1}
        assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200
        return [after - first for after, first in zip(served(replicas), before, strict=True)].index(1)

    systems = [f"You are assistant {number}. " + "Be kind. " * 30 for number in range(12)]
    places = [{ask(system, words) for words in ("One", "Two", "Three")} for system in systems]
    assert all(len(place) == 1 for place in places)
    assert set.union(*places) == {0, 1}


def test_affinity_does_not_overload_a_replica(start: Start, replicas: list[Replica]) -> None:
    url = start("affinity.conf", max_conns=3).url
    threads, results = side_by_side(5, lambda _: complete(url, **LONG).status_code)
    until(lambda: sum(each.count("num_requests_running") for each in replicas) == 5)
    assert sorted(each.count("num_requests_running") for each in replicas) == [2, 3]
    for thread in threads:
        thread.join()
    assert results == [200] * 5
