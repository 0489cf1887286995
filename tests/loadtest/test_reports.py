"""What a run leaves behind: locust's files, a JSON, a page."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.charts import Axis, Line, chart, log_ticks, ticks
from loadtest.cli import main
from tests.loadtest.stub import Stub


def figures_of(page: str) -> list[ElementTree.Element]:
    """The SVGs of a page, parsed strictly."""
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", page)]


class Balanced(HTMLParser):
    """Fails on tags that are not closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {name for name, _ in attrs}
        assert not names & {"src", "href"}, "a page that fetches something is not offline"
        if tag not in ("meta", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("line", "circle", "polyline"):
            assert self.open.pop() == tag


def check_page(page: str) -> None:
    parser = Balanced()
    parser.feed(page)
    assert parser.open == []
    assert "http" not in re.sub(r"http://127\.0\.0\.1:\d+", "", page)
    assert "prefers-color-scheme: dark" in page


@pytest.fixture
def run_files(stub: Callable[..., Stub], tmp_path: Path) -> tuple[Stub, Path]:
    server = stub(fail_every=7, tokens=8, width=2)
    flags = ["--users", "3", "--requests", "40", "--output-tokens", "8", "--slo", "ttft:5000", "--quiet"]
    flags += [
        "--json",
        str(tmp_path / "run.json"),
        "--html",
        str(tmp_path / "run.html"),
        "--csv",
        str(tmp_path / "own"),
    ]
    assert main(["run", server.url, *flags]) == 0
    return server, tmp_path


def test_files_of_a_run(run_files: tuple[Stub, Path]) -> None:
    server, folder = run_files
    result = json.loads((folder / "run.json").read_text())
    assert result["requests"]["attempted"] == 40
    assert result["requests"]["error"] == 5
    assert result["errors"] == {"HTTP 503: overloaded_error": 5}
    assert result["slo"]["attainment"] == pytest.approx(35 / 40)
    assert result["tokens"]["completed"] == 35 * 8
    assert result["tokens"]["server_generated"] == server.generated - 2 == 35 * 8  # 2: the first, small one
    assert result["tokens"]["agree"]
    assert 2.0 <= result["latency_ms"]["tokens_per_chunk"]["mean"] < 3.0  # more where two came in one read
    assert len(result["records"]["rows"]) == 40
    assert all(len(row) == len(result["records"]["columns"]) for row in result["records"]["rows"])
    check_csv(folder)
    page = (folder / "run.html").read_text()
    check_page(page)
    assert len(figures_of(page)) == 6
    assert "HTTP 503: overloaded_error" in page


def check_csv(folder: Path) -> None:
    def rows(name: str) -> list[dict[str, str]]:
        with (folder / f"own_{name}.csv").open(newline="") as file:
            return list(csv.DictReader(file))

    stats = rows("stats")
    assert [row["Name"] for row in stats] == ["words", "Aggregated"]
    assert [row["Type"] for row in stats] == ["POST", ""]
    assert stats[-1]["Request Count"] == "40"
    assert stats[-1]["Failure Count"] == "5"
    assert list(stats[0])[:4] == ["Type", "Name", "Request Count", "Failure Count"]
    shares = ["50%", "66%", "75%", "80%", "90%", "95%", "98%", "99%", "99.9%", "99.99%", "100%"]
    assert list(stats[0])[-11:] == shares
    times = [float(stats[0][share]) for share in shares]
    assert times == sorted(times)
    assert times[0] == pytest.approx(float(stats[0]["Median Response Time"]), abs=1e-3)
    history = rows("stats_history")
    assert history[-1]["Total Request Count"] == "40"
    assert history[-1]["Total Failure Count"] == "5"
    assert [row["Occurrences"] for row in rows("failures")] == ["5"]
    assert rows("exceptions") == []


@given(st.floats(-1e3, 1e3), st.floats(1e-2, 1e6))
def test_ticks_are_within_and_not_too_many(low: float, span: float) -> None:
    found = ticks(low, low + span)
    assert 2 <= len(found) <= 9
    assert low - span * 1e-6 <= found[0] < found[-1] <= low + span * (1 + 1e-6)


@given(st.floats(1e-2, 1e3), st.floats(1, 1e4))
def test_log_ticks_enclose(low: float, factor: float) -> None:
    found = log_ticks(low, low * factor)
    assert found[0] <= low * (1 + 1e-6)
    assert found[-1] >= low * factor * (1 - 1e-6)


def test_a_chart_places_points_by_their_values() -> None:
    line = Line("a <b>", [(1, 0.0), (2, 5.0), (4, 10.0)], [(0.0, 1.0), None, None])
    figure = chart(
        "T & T",
        Axis("x", log=True),
        Axis("y", end=10.0),
        [line, Line("c", [(1, 1.0)], colour=9)],
        [("goal", 5.0)],
    )
    (svg,) = figures_of(figure)
    circles = svg.findall("circle")[:3]
    xs = [float(circle.attrib["cx"]) for circle in circles]
    ys = [float(circle.attrib["cy"]) for circle in circles]
    assert xs[1] - xs[0] == pytest.approx(xs[2] - xs[1], abs=0.2)  # powers of two lie evenly
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)
    goal = next(each for each in svg.findall("line") if each.attrib["class"] == "limit")
    assert float(goal.attrib["y1"]) == pytest.approx(ys[1], abs=0.1)
    assert "a &lt;b&gt;" in figure
    assert "nothing to show" in chart("T", Axis("x"), Axis("y"), [Line("a", [])])


def test_one_point_and_zeros_can_be_drawn() -> None:
    for points in ([(3.0, 0.0)], [(3.0, 2.0)], [(0.0, 0.0), (1.0, 0.0)]):
        figures_of(chart("T", Axis("x"), Axis("y"), [Line("a", points)]))
    figures_of(chart("T", Axis("x", log=True), Axis("y"), [Line("a", [(8.0, 1.0)])]))
