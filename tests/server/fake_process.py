"""A server process with the fake engine, for tests of starting, signals and exit codes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from server.process import run
from server.settings import Settings
from server.startup import StartError
from tests.server.fake import FakeEngine


def main(how: str, port: int, log: str) -> None:
    """Serve until a signal comes. `how`: normal, hasty (impatient at the end), slow or missing (to load)."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)

    def build(settings: Settings, observer: Any, progress: Callable[[str], None]) -> FakeEngine:
        progress("loading the fake")
        if how == "missing":
            raise FileNotFoundError("there is no model at\n/somewhere")
        if how == "slow":
            time.sleep(60)
        engine = FakeEngine(observer)
        engine.step_time = 0.05
        return engine

    settings = Settings(model="fake", port=port, shutdown_timeout=0.2 if how == "hasty" else 10)
    try:
        code = run(settings, build)
    except StartError as exc:
        print(f"dspark serve: {exc}", file=sys.stderr)
        code = 1
    sys.exit(code)
