"""`dspark loadtest run` against servers with known timing, over sockets and in processes of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from loadtest.cli import main
from tests.loadtest.stub import Stub


def run(server: Stub, tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "run.json"
    code = main(["run", server.url, "--quiet", "--json", str(file), *flags])
    return code, json.loads(file.read_text()) if file.exists() else {}


@pytest.mark.slow
def test_what_is_measured_is_what_the_server_wrote(stub: Callable[..., Stub], tmp_path: Path) -> None:
    """Within 2 % of the times at which the stub wrote, whatever else keeps this machine busy."""
    server = stub(prefill=0.2, gap=0.05, width=2, tokens=24)
    code, result = run(server, tmp_path, "--users", "4", "--requests", "24", "--output-tokens", "24")
    assert code == 0
    written = [times for times in server.sent if len(times) == 12]
    paces = [(times[-1] - times[0]) / 22 for times in written]
    assert result["latency_ms"]["tpot"]["p50"] == pytest.approx(1e3 * median(paces), rel=0.02)
    assert result["latency_ms"]["itl_token"]["mean"] == pytest.approx(25, rel=0.05)
    assert result["latency_ms"]["ttft"]["p50"] == pytest.approx(200, rel=0.05)
    span = max(times[-1] for times in written) - min(times[0] for times in written) + 0.2
    assert result["throughput"]["output_tokens_per_second"] == pytest.approx(24 * 24 / span, rel=0.02)
    assert result["tokens"]["agree"] is True
    assert result["latency_ms"]["tpot"]["unsupported"] == ["p90", "p95", "p99"]


def test_several_processes_share_the_load(stub: Callable[..., Stub], tmp_path: Path) -> None:
    server = stub()
    flags = ("--rate", "30", "--run-time", "2", "--processes", "2", "--output-tokens", "16")
    code, result = run(server, tmp_path, *flags)
    assert code == 0
    assert result["requests"]["ok"] == 60
    assert result["health"]["offered_per_second"] == pytest.approx(30.0, rel=0.05)
    assert len(result["health"]["cpu_share"]) == 2
    assert len({json.dumps(request["messages"]) for request in server.requests}) > 55


@pytest.mark.parametrize(("slo", "code"), [("ttft:10000", 0), ("ttft:1", 3)])
def test_the_exit_code_tells_a_missed_objective(
    stub: Callable[..., Stub], tmp_path: Path, slo: str, code: int
) -> None:
    flags = ("--users", "2", "--requests", "6", "--slo", slo, "--fail-on-slo")
    assert run(stub(), tmp_path, *flags)[0] == code


def test_cancelled_requests_are_counted_on_both_sides(stub: Callable[..., Stub], tmp_path: Path) -> None:
    server = stub(tokens=30, gap=0.005)
    flags = ("--users", "4", "--requests", "24", "--cancel-share", "0.5", "--output-tokens", "30")
    code, result = run(server, tmp_path, *flags)
    assert code == 0
    tokens = result["tokens"]
    assert result["requests"]["cancelled"] > 3
    assert result["requests"]["error"] == 0
    assert tokens["completed"] == 30 * result["requests"]["ok"]
    assert 0 < tokens["cut_off"] <= tokens["server_generated_for_cut_off"]
    assert tokens["agree"] is True


@pytest.mark.parametrize("settings", [{"strict": True}, {"continuous": False}])
def test_servers_that_count_only_at_the_end(
    stub: Callable[..., Stub], tmp_path: Path, settings: dict[str, bool]
) -> None:
    code, result = run(
        stub(gap=0.03, width=4, **settings),
        tmp_path,
        "--users",
        "2",
        "--requests",
        "6",
        "--output-tokens",
        "16",
    )
    assert code == 0
    assert result["requests"]["ok"] == 6
    assert 4.0 <= result["latency_ms"]["tokens_per_chunk"]["mean"] < 6.0  # more where two came in one read
    assert result["tokens"]["completed"] == 6 * 16


def test_a_slow_client_is_told_from_a_slow_server(stub: Callable[..., Stub], tmp_path: Path) -> None:
    flags = ("--rate", "20", "--run-time", "1", "--max-in-flight", "1", "--output-tokens", "4")
    code, result = run(stub(prefill=0.1), tmp_path, *flags)
    assert code == 0
    assert any("--max-in-flight" in reason for reason in result["health"]["degraded"])
    assert result["latency_ms"]["ttft"]["max"] > 1000
    assert result["health"]["achieved_per_second"] < 0.5 * result["health"]["offered_per_second"]


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "http://127.0.0.1:1"]) == 1
    assert "does not answer" in capsys.readouterr().err


def test_a_refused_first_request_says_what_was_refused(
    stub: Callable[..., Stub], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", stub(fail_every=1).url]) == 1
    assert "503" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["run"],
        ["run", "http://x", "--users", "-1"],
        ["walk"],
        ["run", "http://x", "--rate", "x"],
        ["run", "http://x", "--scenario", "x.py", "--seeded"],
        ["run", "http://x", "--scenario", "x.py", "--prefix-cache", "text"],
    ],
)
def test_wrong_flags(words: list[str]) -> None:
    try:
        code: Any = main(words)
    except SystemExit as exit:
        code = exit.code
    assert code == 2


def test_it_starts_light() -> None:
    """Neither torch nor the server: the tester may run on a small machine of its own."""
    code = "import sys, loadtest.run_command, loadtest.sweep_command, loadtest.compare\n"
    code += "from loadtest.cli import main; main(['--help'])\n"
    code += "assert not {'torch', 'numpy', 'transformers', 'fastapi', 'server', 'engine'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    for module in (["loadtest"], ["server.cli", "loadtest"]):
        told = subprocess.run([sys.executable, "-m", *module, "--help"], check=True, capture_output=True)
        assert b"sweep CONFIG" in told.stdout


def test_the_servers_count_is_taken_after_the_end(stub: Callable[..., Stub], tmp_path: Path) -> None:
    """Looks at short intervals lie nearer to the end of the run, but before its last tokens."""
    flags = ("--users", "8", "--requests", "40", "--output-tokens", "16", "--scrape-interval", "0.05")
    code, result = run(stub(gap=0.02), tmp_path, *flags)
    assert code == 0
    assert result["tokens"]["server_generated"] == result["tokens"]["completed"] == 40 * 16


def test_the_prefix_cache_is_flushed_where_it_can_be(
    stub: Callable[..., Stub], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--requests", "2", "--output-tokens", "2", "--prefix-cache", "flush")
    server = stub()
    assert run(server, tmp_path, *flags)[0] == 0
    assert server.flushed == 1
    assert run(stub(flushable=False), tmp_path, *flags)[0] == 1
    assert "take another --prefix-cache" in capsys.readouterr().err
