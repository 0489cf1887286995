"""The page in a real headless Chromium: streams, colours, keys, charts, both colour schemes, errors."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import Served
from tests.server.fake import TEXT

api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (PyPI)")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: chromium)"),
]
ANSWER = TEXT.format(choice=0, seed=None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser: Any, served: Served) -> Iterator[Any]:
    """The page, opened; anything that its console or its scripts complain of fails the test."""
    opened = browser.new_page(color_scheme="light")
    opened.set_default_timeout(5000)
    complaints: list[str] = []
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    opened.goto(served.url)
    yield opened
    opened.close()
    # Chromium tells of every reply with an error status, also of one that was asked for.
    assert [each for each in complaints if "status of 400" not in each] == []


def answer(page: Any) -> str:
    return page.locator("#conversation .turn").last.evaluate(
        "turn => [...turn.querySelectorAll('.token')].map(token => token.textContent).join('')"
    )


def until_answered(page: Any) -> None:
    api.expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_an_answer_streams_in_colours(page: Any) -> None:
    api.expect(page.locator("#model")).to_contain_text("fake")
    page.get_by_label("Message").fill("Hello")
    page.get_by_role("button", name="Send").click()
    until_answered(page)
    assert answer(page) == ANSWER
    drafts, corrections = page.locator(".turn .token.draft"), page.locator(".turn .token.correction")
    assert drafts.count() > corrections.count() > 5
    assert drafts.first.get_attribute("title") == "accepted draft"
    steps = page.get_by_role("img", name="steps wrote")
    assert steps.locator("svg").count() > 15
    assert f"wrote {len(ANSWER.encode())} tokens" in page.locator("#summary").inner_text()
    api.expect(page.get_by_role("status").first).to_have_text(ANSWER)


def test_the_keyboard_is_enough(page: Any, served: Served) -> None:
    served.engine.step_time = 0.2
    page.keyboard.press("Tab")
    api.expect(page.get_by_role("link", name="To the message field")).to_be_focused()
    page.keyboard.press("Enter")
    page.get_by_label("Message").focus()
    page.keyboard.press("Control+Enter")
    api.expect(page.get_by_role("button", name="Stop")).to_be_enabled()
    api.expect(page.locator(".turn .token").first).to_be_visible()
    page.keyboard.press("Escape")
    until_answered(page)
    assert 0 < len(answer(page)) < len(ANSWER)
    page.get_by_role("button", name="New conversation").click()
    assert page.locator(".turn").count() == 0


def test_a_conversation_goes_on(page: Any, served: Served) -> None:
    for words in ("One", "Two"):
        page.get_by_label("Message").fill(words)
        page.get_by_role("button", name="Send").click()
        until_answered(page)
    prompt = served.engine.tokenizer.decode(served.engine.streams[-1].request.prompt_token_ids)
    assert prompt == f"<user>One<assistant>{ANSWER}<user>Two<assistant>"


def test_errors_are_told_in_the_servers_words(page: Any, served: Served) -> None:
    page.locator("#form").evaluate("form => form.noValidate = true")
    page.get_by_label("Temperature").fill("-1")
    page.get_by_role("button", name="Send").click()
    api.expect(page.get_by_role("alert")).to_contain_text("temperature")
    until_answered(page)
    page.get_by_label("Temperature").fill("0")
    page.get_by_role("button", name="Send").click()
    until_answered(page)
    assert answer(page) == ANSWER
    assert page.get_by_role("alert").inner_text() == ""


def test_charts_follow_the_load(page: Any, served: Served) -> None:
    served.engine.step_time = 0.05
    load = page.get_by_role("img", name="Load: running")
    api.expect(load).to_be_visible()
    for _ in range(3):
        page.locator("#load").press("ArrowRight")
    api.expect(page.locator("#load-shown")).to_have_text("3")
    api.expect(page.get_by_role("img", name="Load: running 3.00")).to_be_visible()
    page.locator("#load").press("Home")
    api.expect(page.get_by_role("img", name="Load: running 0.00")).to_be_visible()
    assert page.locator("figure svg path.one").first.get_attribute("d").startswith("M")
    assert page.locator("figure").count() == 5


@pytest.mark.parametrize("width", [1280, 360])
def test_light_dark_and_narrow(page: Any, width: int) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(background) != light
    page.set_viewport_size({"width": width, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "it scrolls sideways"
