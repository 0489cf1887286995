"""The command and the server process from outside: help, errors, start, signals, exit codes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server import fake_process

ROOT = Path(__file__).parents[2]
# Importing the engine takes seconds: it is done once, in the process from which the servers are forked.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["server.app", "tests.server.fake_process"])


def dspark(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)


def test_help() -> None:
    top, serve = dspark("--help"), dspark("serve", "--help")
    assert top.returncode == serve.returncode == dspark().returncode == 0
    assert all(command in top.stdout for command in ("serve", "bench", "version"))
    assert all(
        flag in serve.stdout
        for flag in ("--max-num-seqs", "--speculative-config", "--no-enable-prefix-caching")
    )
    assert "DSPARK_MAX_NUM_SEQS" in serve.stdout


def test_version() -> None:
    result = dspark("version")
    assert result.returncode == 0
    assert result.stdout.splitlines()[0].startswith("python 3.")
    assert "dspark-server 0." in result.stdout


def test_help_and_version_are_fast() -> None:
    code = (
        "import sys; from server.cli import main\ntry: main(['serve', '--help'])\nexcept SystemExit: pass\n"
    )
    code += "main(['version']); assert not {'torch', 'fastapi', 'uvicorn'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["serve", "--no-such-flag"], "--no-such-flag"),
        (["serve", "--port", "x"], "--port"),
        (["serve", "-sc", "{"], "JSON"),
        (["serve", "--max-num-s", "3"], "--max-num-s"),
        (["swerve"], "swerve"),
        (["serve", "--port"], "--port"),
    ],
)
def test_bad_arguments(arguments: list[str], word: str) -> None:
    result = dspark(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert word in result.stderr


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = dspark("serve", "--port", str(port))
    assert result.returncode == 1
    assert result.stderr == f"dspark serve: cannot listen on 127.0.0.1 port {port}: Address already in use\n"


def test_bad_host() -> None:
    result = dspark("serve", "--host", "256.1.1.1")
    assert result.returncode == 1
    assert "--host 256.1.1.1" in result.stderr
    assert len(result.stderr.splitlines()) == 1


class Running:
    """A process that serves the fake engine; its log goes to a file."""

    def __init__(self, how: str, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self.process = FORKS.Process(target=fake_process.main, args=(how, self.port, str(log)))
        self.process.start()

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path)

    def until(self, path: str, condition: Callable[[httpx.Response], bool]) -> None:
        """Poll `path` until the reply is right."""
        deadline = time.monotonic() + 30
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if condition(self.get(path)):
                    return
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.02)

    def until_busy(self) -> None:
        self.until("/metrics", lambda reply: 'requests_running{model_name="fake"} 1' in reply.text)

    def kill(self, which: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, which)

    def exit_code(self, timeout: float) -> int | None:
        self.process.join(timeout)
        return self.process.exitcode

    @property
    def log(self) -> str:
        return self._log.read_text()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Running]]:
    running: list[Running] = []

    def start(how: str) -> Running:
        running.append(Running(how, tmp_path / "log"))
        return running[-1]

    yield start
    for one in running:
        one.process.kill()
        one.process.join()


Start = Callable[[str], Running]


def test_sigterm_lets_streams_finish(start: Start) -> None:
    server = start("normal")
    server.until("/ready", lambda reply: reply.status_code == 200)
    texts: list[str] = []

    def read() -> None:
        body = {"messages": [{"role": "user", "content": "a"}], "stream": True}
        texts.append(httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=20).text)

    reader = threading.Thread(target=read)
    reader.start()
    server.until_busy()
    server.kill(signal.SIGTERM)
    server.until("/ready", lambda reply: reply.status_code == 503)
    assert server.get("/health").status_code == 200
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}).status_code == 503
    server.kill(signal.SIGTERM)
    reader.join()
    assert texts[0].endswith("data: [DONE]\n\n")
    assert '"finish_reason":"stop"' in texts[0]
    assert server.exit_code(10) == 0
    assert "loading the fake" in server.log
    assert "256 pages = 4,096 tokens = 8.0 full contexts of 512" in server.log
    assert f"Ready on {server.url}" in server.log
    assert re.search(r'curl -N .*"stream": true', server.log)
    assert "Traceback" not in server.log


def test_interrupt_and_shutdown_timeout(start: Start) -> None:
    server = start("hasty")
    server.until("/ready", lambda reply: reply.status_code == 200)
    replies: list[Any] = []
    body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True}
    url = f"{server.url}/v1/completions"
    reader = threading.Thread(target=lambda: replies.append(httpx.post(url, json=body, timeout=20)))
    reader.start()
    server.until_busy()
    begin = time.monotonic()
    server.kill(signal.SIGINT)
    assert server.exit_code(10) == 0
    assert time.monotonic() - begin < 4
    reader.join()
    assert replies[0].status_code == 503


def test_second_interrupt_does_not_wait(start: Start) -> None:
    server = start("normal")
    server.until("/ready", lambda reply: reply.status_code == 200)
    body = {"prompt": "a", "max_tokens": 500, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body | {"stream": True}):
        server.kill(signal.SIGINT)
        server.until("/ready", lambda reply: reply.status_code == 503)
        server.kill(signal.SIGINT)
        assert server.exit_code(8) == 130


def test_signal_while_loading(start: Start) -> None:
    server = start("slow")
    server.until("/health", lambda reply: reply.status_code == 200)
    assert server.get("/ready").status_code == 503
    server.kill(signal.SIGTERM)
    assert server.exit_code(8) == 0


def test_model_that_cannot_be_loaded(start: Start) -> None:
    server = start("missing")
    assert server.exit_code(30) == 1
    assert "Traceback" not in server.log
    assert server.log.splitlines()[-1] == "dspark serve: cannot load fake: there is no model at /somewhere"
