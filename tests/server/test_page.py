"""The page and its files; a browser uses it in test_page_in_browser.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from server import page
from tests.server.conftest import Served

FOLDER = Path(page.__file__).with_name("static")


def test_every_file_is_served(served: Served) -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(page._FILES.values())
    for path, name in page._FILES.items():
        reply = served.client.get(path)
        assert reply.status_code == 200
        assert reply.content == (FOLDER / name).read_bytes()
        assert reply.headers["content-type"].endswith("charset=utf-8")
        assert "default-src 'self'" in reply.headers["content-security-policy"]
        assert reply.headers["x-content-type-options"] == "nosniff"
    assert served.client.head("/").status_code == 200
    assert served.metrics.value("http_requests_total", path="/static/chart.js", status="200")
    assert served.client.get("/static/nothing.js").status_code == 404


def test_it_asks_nobody_else_and_has_no_inline_code() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
        assert "http:" not in text, path.name
        assert "https:" not in text, path.name
    markup = (FOLDER / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<script(?![^>]*src=)|\son\w+=|\sstyle=", markup)
    for source in re.findall(r'(?:src|href)="([^"#][^"]*)"', markup):
        assert f"/{source}" in (*page.PATHS, "/docs"), "relative, so that it works below any path"
    for script in FOLDER.glob("*.js"):
        for imported in re.findall(r'from "\./([^"]+)"', script.read_text(encoding="utf-8")):
            assert f"/static/{imported}" in page.PATHS


def test_every_field_has_a_label() -> None:
    markup = (FOLDER / "index.html").read_text(encoding="utf-8")
    for name in re.findall(r'<(?:input|textarea|select)[^>]*id="([^"]+)"', markup):
        wrapped = re.search(rf'<label>[^<]*<\w+[^>]*id="{name}"', markup)
        assert wrapped or f'<label for="{name}"' in markup, name


@pytest.mark.parametrize("path", ["/", "/static/style.css"])
def test_it_can_be_switched_off(serve: Callable[..., Served], path: str) -> None:
    assert serve(enable_playground=False).client.get(path).status_code == 404
