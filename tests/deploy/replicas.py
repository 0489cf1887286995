"""Real server processes with the fake engine, a real nginx before them, and clients that keep asking."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx

from tests.server import fake_process
from tests.server.test_process import FORKS

DEPLOY = Path(__file__).parents[2] / "deploy"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def until(condition: Callable[[], object], timeout: float = 30.0) -> None:
    """Poll until `condition` holds; connections that fail count as no."""
    deadline = time.monotonic() + timeout
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if condition():
                return
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


class Replica:
    """A server process on a port of its own, which it keeps when it is started again."""

    def __init__(self, log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self.start()

    def start(self) -> None:
        self.process = FORKS.Process(target=fake_process.main, args=("normal", self.port, str(self._log)))
        self.process.start()
        until(lambda: httpx.get(f"{self.url}/ready").status_code == 200)

    def signal(self, which: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, which)

    def exit_code(self) -> int | None:
        self.process.join(20)
        return self.process.exitcode

    def count(self, name: str, **labels: str) -> float:
        """A metric's samples with these labels, summed."""
        total = 0.0
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            if line.startswith(f"dspark:{name}{{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
                total += float(line.rpartition(" ")[2])
        return total

    def close(self) -> None:
        self.process.kill()
        self.process.join()


class Balancer:
    """nginx with the shipped configuration; only addresses are replaced."""

    def __init__(self, folder: Path, replicas: Sequence[Replica], conf: str, max_conns: int = 48) -> None:
        assert NGINX is not None
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        shutil.copytree(DEPLOY / "nginx", folder)
        for file in folder.glob("replicas*.conf"):
            rest = re.search(r"^server replica-1:8000(.*)$", file.read_text(), re.M)
            assert rest is not None
            options = re.sub(r"max_conns=\d+", f"max_conns={max_conns}", rest[1]).replace(" resolve", "")
            file.write_text("".join(f"server 127.0.0.1:{each.port}{options}\n" for each in replicas))
        main, proxy = folder / conf, folder / "proxy.conf"
        main.write_text(main.read_text().replace("/tmp/nginx.pid", str(folder / "nginx.pid")))
        proxy.write_text(proxy.read_text().replace("listen 8080;", f"listen 127.0.0.1:{self.port};"))
        self.log = folder / "log"
        self._process = subprocess.Popen(
            [NGINX, "-e", "stderr", "-c", str(main), "-g", "daemon off;"], stderr=self.log.open("w")
        )
        until(lambda: httpx.get(f"{self.url}/nginx-health").status_code == 204)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)


class Clients:
    """Threads that send one request after another until they are told to stop."""

    def __init__(self, url: str, threads: int) -> None:
        self.failures: list[str] = []
        self.answered = 0
        self._url = url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(i % 2 == 0,)) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self, stream: bool) -> None:
        with httpx.Client(base_url=self._url, timeout=30) as client:
            while not self._stop.is_set():
                try:
                    reply = client.post(
                        "/v1/completions", json={"prompt": "a", "max_tokens": 50, "stream": stream}
                    )
                except httpx.HTTPError as error:
                    self.failures.append(repr(error))
                    continue
                whole = (
                    reply.text.endswith("data: [DONE]\n\n") if stream else '"finish_reason":"' in reply.text
                )
                if reply.status_code == 200 and whole and '"error"' not in reply.text:
                    self.answered += 1
                else:
                    self.failures.append(f"{reply.status_code} {reply.text[-300:]}")

    def finish(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
