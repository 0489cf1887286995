"""Sweeps from end to end, with stubs and with our server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loadtest.cli import main
from loadtest.configurations import Configuration, ServerFailed, configuration, running, serve_command
from loadtest.sweep import Ladder, Point, Store, SweepError, climb
from tests.loadtest.stub import Stub
from tests.loadtest.test_reports import check_page, figures_of

SHORT = [
    "--run-time",
    "1.2",
    "--warmup",
    "0.2",
    "--output-tokens",
    "8",
    "--quiet",
    "--scrape-interval",
    "0.4",
]


@pytest.mark.parametrize(
    ("word", "flags"),
    [
        ("off", ("--speculative-config", '{"method": "off"}')),
        ("fixed:4", ("--verify-policy", "fixed:4")),
        ("threshold:base=0.4,min=1", ("--verify-policy", "threshold:base=0.4,min=1")),
        ("lookahead", ("--verify-policy", "lookahead")),
        ("own=--verify-policy fixed:2 --threads 1", ("--verify-policy", "fixed:2", "--threads", "1")),
    ],
)
def test_configurations_by_name(word: str, flags: tuple[str, ...]) -> None:
    found = configuration(word, None, None)
    assert found is not None
    assert (found.url, found.flags) == (None, flags)
    assert serve_command(found, ["m"])[3:] == ["serve", "m", *flags, "--port", "0"]


def test_further_configurations() -> None:
    assert configuration("mtp1", None, None) is None
    mtp = configuration("mtp1", None, "folder")
    assert mtp is not None
    assert json.loads(mtp.flags[1]) == {"method": "mtp", "model": "folder", "num_speculative_tokens": 1}
    drafted = configuration("lagged", '{"method": "dspark"}', None)
    assert drafted is not None
    assert drafted.flags == ("--speculative-config", '{"method": "dspark"}', "--verify-policy", "lagged")
    assert configuration("other=http://x:1", None, None) == Configuration("other", "http://x:1")
    assert configuration("http://x:1/", None, None) == Configuration("x:1", "http://x:1/")
    with pytest.raises(ValueError, match="no configuration"):
        configuration("fast", None, None)


def test_a_server_that_does_not_start(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="log"), running(["false"], tmp_path / "log"):
        pass


@pytest.mark.slow
def test_two_servers_in_one_report(
    stub: Callable[..., Stub], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow, fast = stub(gap=0.02, tokens=8), stub(gap=0.01, tokens=8)
    words = ["sweep", f"slow={slow.url}", f"fast={fast.url}", "mtp1", "--users", "1", "2", "--repeats", "2"]
    words += ["--slo", "tpot:15", "--attainment", "0.8", "--output", str(tmp_path), *SHORT]
    assert main(words) == 0
    out = capsys.readouterr()
    assert "mtp1 is left out" in out.err
    whole = json.loads((tmp_path / "sweep.json").read_text())
    assert {name: sorted(loads) for name, loads in whole["points"].items()} == {
        "slow": ["1", "2"],
        "fast": ["1", "2"],
    }
    assert all(len(runs) == 2 for loads in whole["points"].values() for runs in loads.values())
    page = (tmp_path / "sweep.html").read_text()
    check_page(page)
    assert len(figures_of(page)) >= 8
    assert "More throughput at the same pace" in out.out
    first = slow.requests[2]["messages"][0]
    assert first["role"] == "system"  # a first line that no other point has: caches do not help

    before = len(slow.requests) + len(fast.requests)
    next((tmp_path / "points").glob("fast@2.1.json")).unlink()
    assert main(words) == 0  # goes on: only the missing point is measured
    assert len(slow.requests) + len(fast.requests) - before < 40
    assert len(list((tmp_path / "points").iterdir())) == 8
    again = [word if word != "tpot:15" else "tpot:99" for word in words]
    assert main(again) == 1
    assert "another slo" in capsys.readouterr().err

    assert main(["compare", f"{tmp_path}/sweep.json:slow", f"{tmp_path}/sweep.json:fast"]) == 0
    assert "tpot_p50" in capsys.readouterr().out
    assert main(["compare", f"{tmp_path}/sweep.json:slow", f"{tmp_path}/sweep.json:none"]) == 2


def test_flags_that_cannot_be_read_leave_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "off", "--serve-args", "--x 'y", "--output", str(tmp_path / "out")]) == 2
    assert "--serve-args" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("together", [False, True])
def test_the_order_of_points(tmp_path: Path, together: bool) -> None:
    configs = [Configuration(name, url=f"http://{name}") for name in ("a", "b")]
    seen: list[str] = []

    def measured(point: Point, url: str) -> dict[str, Any]:
        assert url == f"http://{point.config.name}"
        seen.append(f"{point.config.name}{point.load:g}.{point.seed}")
        return {"cut_short": "saturated: full" if point.file == "a@2.0.json" else None}

    def go() -> None:
        store = Store(tmp_path, {})
        climb(configs, Ladder((1, 2, 4), False), [0, 1], store, measured, [], lambda line: None, together)

    go()
    if together:
        assert " ".join(seen) == "a1.0 b1.0 a1.1 b1.1 a2.0 b2.0 a2.1 b2.1 b4.0 a4.1 b4.1"
    else:
        assert " ".join(seen) == "a1.0 a2.0 b1.0 b2.0 b4.0 a1.1 a2.1 a4.1 b1.1 b2.1 b4.1"
    (tmp_path / "points" / "b@2.1.json").unlink()
    seen.clear()
    go()
    assert seen == ["b2.1"]
    configs[0] = Configuration("a", url="http://elsewhere")
    with pytest.raises(SweepError, match="another address"):
        go()


def test_a_saturated_rung_ends_the_ladder(
    stub: Callable[..., Stub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def full(observation: object) -> str:
        seen.append(observation)
        return "saturated: as the test says"

    monkeypatch.setattr("loadtest.sweep_command.saturated", full)
    words = ["sweep", f"one={stub().url}", "--rates", "5", "10", "--output", str(tmp_path), *SHORT]
    assert main(words) == 0
    assert [file.name for file in (tmp_path / "points").iterdir()] == ["one@5.0.json"]
    count = len(seen)
    assert main(words) == 0  # nothing is left to do
    assert len(seen) == count


def test_missed_at_every_load(stub: Callable[..., Stub], tmp_path: Path) -> None:
    words = ["sweep", f"one={stub().url}", "--users", "1", "--slo", "ttft:1", "--fail-on-slo"]
    assert main([*words, "--output", str(tmp_path), *SHORT]) == 3


@pytest.mark.long
@pytest.mark.model
def test_our_server_with_two_configurations(tmp_path: Path) -> None:
    words = ["sweep", "off", "fixed:2", "--users", "1", "2", "--output", str(tmp_path)]
    words += ["--serve-args", "--max-model-len 1024", "--cancel-share", "0.2", "--temperature", "0"]
    assert main([*words, "--run-time", "6", "--warmup", "1", "--output-tokens", "24", "--quiet"]) == 0
    whole = json.loads((tmp_path / "sweep.json").read_text())
    for config, loads in whole["points"].items():
        for runs in loads.values():
            assert runs[0]["requests"]["error"] == 0
            assert runs[0]["tokens"]["agree"] is True
            assert runs[0]["tokens"]["completed"] > 0
            assert ("acceptance_rate" in runs[0]["server"]) == (config == "fixed:2")
