"""`dspark complete` and `dspark chat`, over HTTP, in this process and in one of their own."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from server.cli_chat import harmless, summary
from server.cli_chat import main as chat
from server.cli_complete import main as complete
from tests.server.conftest import Served
from tests.server.test_generation_api import ANSWER

ROOT = Path(__file__).parents[2]


def last_prompt(served: Served) -> str:
    return bytes(i for i in served.engine.streams[-1].request.prompt_token_ids if i < 256).decode()


# ---- complete


def test_a_text_is_continued(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert complete(["hello", "--url", served.url, "--max-tokens", "400"]) == 0
    written = capsys.readouterr()
    assert (written.out, written.err) == (ANSWER, "")
    assert last_prompt(served) == "hello"


def test_flags_reach_the_server(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--temperature",
        "0.5",
        "--top-p",
        "0.9",
        "--seed",
        "7",
        "--stop",
        "quick",
        "--model",
        "alias/of-it",
    ]
    assert complete(["hello", "--url", served.url + "/", "--max-tokens", "99", *flags]) == 0
    params = served.engine.streams[-1].request.params
    assert (params.temperature, params.top_p, params.seed, params.stop) == (0.5, 0.9, 7, ("quick",))
    assert capsys.readouterr().out.endswith("the ")


def test_a_question_is_answered(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert complete(["why?", "--chat", "--url", served.url]) == 0
    assert last_prompt(served) == "<user>why?<assistant>"
    assert complete(["why?", "--system", "be brief", "--url", served.url]) == 0
    assert last_prompt(served) == "<system>be brief<user>why?<assistant>"
    assert capsys.readouterr().out == ANSWER * 2


def run(served: Served, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "server.cli", "complete", "--url", served.url, *arguments]
    given = None if text is None else text.encode()
    return subprocess.run(command, cwd=ROOT, input=given, capture_output=True, timeout=60, check=False)


def test_from_standard_input_in_a_pipe(served: Served) -> None:
    result = run(served, "--max-tokens", "400", text="Grüße 👍\n")
    assert (result.returncode, result.stdout.decode(), result.stderr) == (0, ANSWER, b"")
    assert last_prompt(served) == "Grüße 👍\n"


def test_exit_codes(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert complete(["a", "--url", served.url, "--temperature", "9"]) == 1
    assert "temperature must be" in capsys.readouterr().err
    served.engine.fail_after = 20
    assert complete(["a", "--url", served.url, "--max-tokens", "400"]) == 1
    written = capsys.readouterr()
    assert ANSWER.startswith(written.out)
    assert "not finite" in written.err
    assert complete(["a", "--url", "http://127.0.0.1:9"]) == 3
    assert "no server" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        complete(["a", "--max-tokens", "many"])
    assert caught.value.code == 2


def test_keys_come_from_the_environment(
    serve: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve(api_key=["k1", "k2"])
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    assert complete(["a", "--url", served.url]) == 1
    assert "API key" in capsys.readouterr().err
    monkeypatch.setenv("DSPARK_API_KEY", "k2, k1")
    assert complete(["a", "--url", served.url]) == 0


# ---- chat


def talk(served: Served, monkeypatch: pytest.MonkeyPatch, *lines: str, flags: tuple[str, ...] = ()) -> str:
    """What the terminal shows of a conversation that ends with the input."""
    shown = io.StringIO()
    console = Console(file=shown, width=200, highlight=False, force_terminal=False)
    typed = iter(lines)

    def read(*_: Any, **__: Any) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr(console, "input", read)
    assert chat(["--url", served.url, *flags], console) == 0
    return shown.getvalue()


def test_a_conversation_shows_speed_and_accepted_lengths(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = talk(served, monkeypatch, "one", "two")
    assert shown.count(ANSWER) == 2
    assert last_prompt(served) == f"<user>one<assistant>{ANSWER}<user>two<assistant>"
    tokens = len(ANSWER.encode())
    assert f"{tokens} tokens, {(tokens - 1) / 0.4:.0f} tokens/s, the first after 0.10 s" in shown
    assert "accepted length 3.33 where drafts were verified (7 of 13)" in shown


def test_commands(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    talk(served, monkeypatch, "one", "/reset", "two", "/exit", "never")
    assert last_prompt(served) == "<user>two<assistant>"
    talk(served, monkeypatch, "one", "/system rules", "", "two", flags=("--temperature", "0.5"))
    assert last_prompt(served) == "<system>rules<user>two<assistant>"
    assert served.engine.streams[-1].request.params.temperature == 0.5
    assert "/reset forgets" in talk(served, monkeypatch, "/what")


def test_an_error_does_not_end_the_conversation(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.engine.queue_limit = 0
    shown = talk(served, monkeypatch, "one", "two")
    assert shown.count("The request queue is full") == 2
    assert chat(["--url", "http://127.0.0.1:9"], Console(file=io.StringIO())) == 3


def test_an_interrupted_answer_stays_said(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    out, pieces = Console.out, []

    def interrupt(self: Console, *objects: Any, **options: Any) -> None:
        out(self, *objects, **options)
        pieces.append(objects[0])
        if len(pieces) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(Console, "out", interrupt)
    talk(served, monkeypatch, "one", "two")
    said = "".join(pieces[:4])
    assert said
    assert last_prompt(served) == f"<user>one<assistant>{said}<user>two<assistant>"


def test_a_model_cannot_steer_the_terminal() -> None:
    assert harmless("a\x1b[2J\x07\x9bb\r\n\tc 👩‍👩‍👧 é") == "a[2Jb\n\tc 👩‍👩‍👧 é"


def test_servers_that_tell_less_are_fine() -> None:
    assert summary({}) == ""
    assert summary({"usage": {"completion_tokens": 3}}) == "3 tokens"
    told = {"time_to_first_token_ms": 5.0, "generation_time_ms": None}
    figures = {"usage": {"completion_tokens": 1}, "metrics": told}
    assert summary(figures) == "1 tokens, the first after 0.01 s, no drafts"
