"""What a stream tells of each token on request: how it came about, and bytes that add up to the text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.outputs import Round
from server.token_origins import origin
from tests.server.conftest import Served


@pytest.mark.parametrize(
    ("made", "origins"),
    [
        (Round(0, 0, 1), ["plain"]),
        (Round(3, 0, 1), ["correction"]),
        (Round(3, 2, 3), ["draft", "draft", "correction"]),
        (Round(2, 2, 3), ["draft", "draft", "bonus"]),
    ],
)
def test_origins(made: Round, origins: list[str]) -> None:
    assert [origin(place, made) for place in range(made.tokens)] == origins


def chunks(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("chat", [True, False])
def test_bytes_of_tokens_are_the_text(served: Served, chat: bool) -> None:
    options = {"stream": True, "n": 2, "stream_options": {"include_speculation": True}}
    reply = served.chat(**options) if chat else served.complete(**options)
    for index in (0, 1):
        text, told = "", b""
        for chunk in chunks(reply.text):
            choice = chunk["choices"][0]
            if choice["index"] != index:
                continue
            text += choice["delta"].get("content", "") if chat else choice["text"]
            for step in choice.get("speculation", {"steps": []})["steps"]:
                told += bytes(value for token in step["tokens"] for value in token["bytes"])
                assert [token["origin"] for token in step["tokens"]].count("draft") == step["accepted"]
        assert told.decode() == text
        assert "👍" in text


def test_nothing_is_told_unasked(served: Served) -> None:
    assert "speculation" not in served.chat(stream=True).text
    assert "speculation" not in served.chat(stream=True, stream_options={"include_usage": True}).text
    assert "speculation" not in served.chat().text
    wrong = served.chat(stream=True, stream_options={"include_speculation": 1})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "stream_options.include_speculation")
