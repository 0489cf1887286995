"""The tester's own cost, which must never be taken for the server's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtest.cli import main
from tests.loadtest.stub import Stub


@pytest.mark.long
def test_three_hundred_chunks_a_second_take_a_twentieth_of_a_core(
    stub: Callable[..., Stub], tmp_path: Path
) -> None:
    server = stub(prefill=0.01, gap=0.05, tokens=100)
    file = tmp_path / "run.json"
    flags = ["--users", "16", "--run-time", "8", "--warmup", "2", "--output-tokens", "100", "--drain", "0"]
    assert main(["run", server.url, "--quiet", "--json", str(file), *flags]) == 0
    result = json.loads(file.read_text())
    chunks = result["throughput"]["output_tokens_per_second"]
    assert chunks > 250
    assert result["health"]["cpu_share"][0] <= 0.05 * chunks / 300
