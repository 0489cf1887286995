"""Whatever is sent: success or a well-formed 4xx, and the next request works. Seconds, or minutes at will."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.protocol import ChatRequest, CompletionRequest
from server.responses_protocol import ResponsesRequest
from server.tokenize import DetokenizeRequest, TokenizeRequest
from server.unsupported import NEUTRAL, NO_EFFECT
from tests.server.conftest import Served
from tests.server.test_statuses import GOOD

MINUTES = 10
MODELS = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
WORDS = [
    "type", "text", "role", "content", "user", "assistant", "system", "include_usage", "name", "tool_calls",
    "1", "a", "message", "input_text", "format", "json_object", "function", "parameters", "", "self",
]  # fmt: skip

#: from every plane of Unicode, with what breaks naive code: surrogates' neighbours, marks, joiners, controls
TEXTS = st.text(
    st.characters(exclude_categories=["Cs"])
    | st.sampled_from("\x00\x1b\x7f\u0085\u200d\u202e\u2028\u2029\ufeff\uffff\u0301🇩👩\U000e0041\U0010ffff"),
    max_size=30,
)
NUMBERS = (
    st.integers(-3, 40)
    | st.integers()
    | st.sampled_from([2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**400, -(10**30)])
    | st.floats(allow_nan=False, allow_infinity=False)
)
SCALARS = st.none() | st.booleans() | NUMBERS | st.sampled_from(WORDS) | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(WORDS) | TEXTS, inner, max_size=4)
    ),
    max_leaves=15,
)


@st.composite
def requests(draw: st.DrawFn) -> tuple[str, bytes]:
    """A path and the bytes of a body, from nearly right to nonsense."""
    path = draw(st.sampled_from(sorted(MODELS)))
    kind = draw(st.sampled_from(["fields", "fields", "fields", "nested", "bytes", "mutated"]))
    if kind == "bytes":
        return path, draw(st.binary(max_size=200))
    if kind == "nested":
        opening, closing = draw(st.sampled_from([(b"[", b"]"), (b'{"a":', b"}"), (b'[{"a":', b"}]")]))
        depth = draw(st.sampled_from([1, 10, 100, 190, 201, 1000, 100_000]))
        name = draw(st.sampled_from(sorted(MODELS[path].model_fields)))
        return path, b'{"%s":%s1%s}' % (name.encode(), opening * depth, closing * depth)
    fields = sorted({*MODELS[path].model_fields, *NEUTRAL, *NO_EFFECT})
    body = dict(GOOD[path]) if draw(st.booleans()) else {}
    body |= draw(st.dictionaries(st.sampled_from(fields) | TEXTS, VALUES, max_size=4))
    raw = json.dumps(body, ensure_ascii=draw(st.booleans())).encode()
    if kind == "mutated":
        at = draw(st.integers(0, len(raw)))
        raw = raw[:at] + draw(st.binary(max_size=3)) + raw[at + draw(st.integers(0, 3)) :]
    return path, raw


def check(reply: httpx.Response, sent: bytes) -> None:
    if reply.status_code == 200:
        if reply.headers["content-type"].startswith("text/event-stream"):
            assert b"data: " in reply.content
        else:
            assert isinstance(reply.json(), dict)
        return
    assert 400 <= reply.status_code < 500, (sent, reply.text)
    assert len(reply.content) < 10_000, sent
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"], sent


def fuzz(served: Served, path: str, raw: bytes) -> None:
    check(served.client.post(path, content=raw, headers={"Content-Type": "application/json"}), raw)


SETTINGS: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "database": None,
}


@settings(max_examples=400, derandomize=True, **SETTINGS)
@given(requests())
def test_any_body(served: Served, request: tuple[str, bytes]) -> None:
    fuzz(served, *request)


@settings(max_examples=60, derandomize=True, **SETTINGS)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_tokenizing_always_answers_and_comes_back(served: Served, text: str) -> None:
    """Some servers close the connection on certain texts."""
    reply = served.post("/tokenize", {"prompt": text, "add_special_tokens": False})
    assert reply.status_code == 200
    assert served.post("/detokenize", {"tokens": reply.json()["tokens"]}).json()["prompt"] == text


@pytest.mark.parametrize("plane", range(17))
def test_every_plane_of_unicode(served: Served, plane: int) -> None:
    """As raw UTF-8 and escaped, as text, as a stop string, and as the name of a field."""
    codes = range(plane << 16, (plane + 1) << 16, 0x1F1)
    text = "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)[:120]
    for ascii_only in (False, True):
        for body in (
            {"prompt": text, "echo": True, "max_tokens": 1},
            {"prompt": "a", "stop": [text]},
            {"prompt": "a", text: text},
            {"prompt": "a", "bad_words": [text]},
        ):
            raw = json.dumps(body, ensure_ascii=ascii_only).encode()
            fuzz(served, "/v1/completions", raw)
        reply = served.post("/v1/completions", {"prompt": text, "echo": True, "max_tokens": 0})
        assert reply.json()["choices"][0]["text"] == text


@pytest.mark.long
@pytest.mark.timeout((MINUTES + 2) * 60)
def test_any_body_for_minutes(served: Served) -> None:
    end = time.monotonic() + MINUTES * 60
    count = 0

    @settings(max_examples=2000, **SETTINGS)
    @given(requests())
    def round_of_many(request: tuple[str, bytes]) -> None:
        nonlocal count
        fuzz(served, *request)
        count += 1

    while time.monotonic() < end:
        round_of_many()
        assert served.complete().status_code == 200
    assert count > 1000
