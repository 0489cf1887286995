"""Server configurations by name, and our own server started with one of them."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_POLICIES = ("threshold", "lagged", "lookahead", "algorithm1")
NAMES = "off, mtp1, fixed:K, " + ", ".join(_POLICIES)


class ServerFailed(RuntimeError):
    """Our server did not come up; the message says where its log is."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """A server that runs at `url`, or else ours, started with `flags`."""

    name: str
    url: str | None = None
    flags: tuple[str, ...] = ()

    @property
    def slug(self) -> str:
        """Its name in file names."""
        return re.sub(r"[^A-Za-z0-9.]+", "-", self.name).strip("-")


def configuration(word: str, drafting: str | None, mtp_drafter: str | None) -> Configuration | None:
    """What a word of the command line means; None: mtp1 without a drafter for it.

    A name of ours, NAME=URL, a URL, or NAME=FLAGS with the flags of `dspark serve`. `drafting` is the
    speculative configuration of those that draft, `mtp_drafter` the folder of an MTP model. Raises
    ValueError.
    """
    if word.startswith(("http://", "https://")):
        return Configuration(word.partition("://")[2].rstrip("/"), url=word)
    if word == "off":
        return Configuration(word, flags=("--speculative-config", '{"method": "off"}'))
    if word == "mtp1":
        if mtp_drafter is None:
            return None
        config = {"method": "mtp", "model": mtp_drafter, "num_speculative_tokens": 1}
        return Configuration(
            word, flags=("--speculative-config", json.dumps(config), "--verify-policy", "fixed:1")
        )
    if re.fullmatch(r"fixed:[1-9]\d*", word) or word.partition(":")[0] in _POLICIES:
        drafted = ("--speculative-config", drafting) if drafting else ()
        return Configuration(word, flags=(*drafted, "--verify-policy", word))
    name, given, rest = word.partition("=")
    if given and re.fullmatch(r"[\w.:+-]+", name):
        if rest.startswith(("http://", "https://")):
            return Configuration(name, url=rest)
        return Configuration(name, flags=tuple(shlex.split(rest)))
    raise ValueError(f"{word!r} is no configuration: give {NAMES}, a URL, NAME=URL or NAME=FLAGS")


def serve_command(config: Configuration, extra: Sequence[str]) -> list[str]:
    """How our server is started with a configuration, on a port that it picks."""
    return [sys.executable, "-m", "server.cli", "serve", *extra, *config.flags, "--port", "0"]


@contextmanager
def running(command: Sequence[str], log: Path, patience: float = 600.0) -> Iterator[str]:
    """Start a server of ours, give its URL once it is ready, and stop it afterwards. Raises ServerFailed."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
    try:
        yield _ready_url(process, log, patience)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready_url(process: subprocess.Popen[bytes], log: Path, patience: float) -> str:
    deadline = time.monotonic() + patience
    while True:
        text = log.read_text(encoding="utf-8", errors="replace")
        if match := re.search(r"Ready on (http://\S+)", text):
            return match[1]
        if process.poll() is not None:
            last = text.strip().splitlines()[-1:] or ["it said nothing"]
            raise ServerFailed(f"the server ended with code {process.returncode}: {last[0]} (log: {log})")
        if time.monotonic() > deadline:
            raise ServerFailed(f"the server was not ready in {patience:g} s (log: {log})")
        time.sleep(0.1)
