"""A real engine behind HTTP: streamed is whole, drafts change nothing, scored prompts are the model's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from server.settings import Settings
from tests.engine.harness import VOCAB, babbler, one_thread, reference  # noqa: F401
from tests.server.conftest import Served
from tests.server.tiny import PIECES, tiny_engine

PROMPT = [3, 14, 15, 9, 26, 5, 35, 3, 14, 15, 9]


@pytest.fixture(scope="module")
def drafting() -> Iterator[Served]:
    served = Served(Settings(model="tiny"), lambda metrics: tiny_engine(metrics, babbler(), "fixed:4"))
    yield served
    served.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    served = Served(Settings(model="tiny"), tiny_engine)
    yield served
    served.close()


def whole(served: Served, body: dict[str, Any]) -> dict[str, Any]:
    reply = served.post("/v1/completions", body)
    assert reply.status_code == 200, reply.text
    content: dict[str, Any] = reply.json()
    return content


def in_pieces(served: Served, body: dict[str, Any]) -> dict[str, Any]:
    """A streamed reply, put together to what the whole one should be."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    raw = served.post("/v1/completions", body | options).text
    found = [json.loads(line[6:]) for line in raw.split("\n\n") if line.startswith("data: {")]
    choices: dict[int, dict[str, Any]] = {}
    for event in found:
        for piece in event["choices"]:
            one = choices.setdefault(piece["index"], {"text": "", "token_ids": [], "logprobs": {}})
            one["text"] += piece["text"]
            one["token_ids"] += piece["token_ids"]
            for name, values in (piece["logprobs"] or {}).items():
                one["logprobs"].setdefault(name, []).extend(values)
            if piece["finish_reason"] is not None:
                one["finish"] = (piece["finish_reason"], piece["stop_reason"])
    return {"usage": found[-1]["usage"], "choices": [choices[index] for index in sorted(choices)]}


def close(one: Any, other: Any) -> bool:
    """The same, but for the rounding of sums over batches of another shape."""
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[name], other[name]) for name in one)
    return one == (pytest.approx(other, abs=1e-6) if isinstance(one, float) else other)


#: single pieces, parts of them, and several in a row: what a stop string may begin or end inside of
STOPS = st.lists(
    st.sampled_from(
        [piece.decode() for piece in PIECES[3:] if piece.decode(errors="ignore").encode() == piece]
    )
    | st.sampled_from(["👍🏽", "日本", "é", "e\u0301", "\ufffd", "\ufffda", "ab", "op", "stop", "a the", " "])
    | st.text(alphabet="ab.stop日👍", min_size=1, max_size=3),
    min_size=0,
    max_size=4,
)


@settings(
    max_examples=60, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(
    stops=STOPS,
    seed=st.integers(0, 2**40),
    max_tokens=st.integers(1, 60),
    flags=st.fixed_dictionaries(
        {
            "echo": st.booleans(),
            "include_stop_str_in_output": st.booleans(),
            "skip_special_tokens": st.booleans(),
            "ignore_eos": st.booleans(),
        }
    ),
    n=st.integers(1, 2),
)
def test_streamed_is_whole_byte_for_byte(
    drafting: Served,
    plain: Served,
    stops: list[str],
    seed: int,
    max_tokens: int,
    flags: dict[str, bool],
    n: int,
) -> None:
    """Texts, logprobs (one a token), offsets, ids, usage, reasons; and all of it as without drafts."""
    body = flags | {
        "prompt": PROMPT, "seed": seed, "max_tokens": max_tokens, "stop": stops, "logprobs": 2, "n": n,
        "return_token_ids": True, "temperature": 1.5,
    }  # fmt: skip
    reply, pieces = whole(drafting, body), in_pieces(drafting, body)
    assert len(pieces["choices"]) == len(reply["choices"]) == n
    tokens = 0
    for choice, streamed in zip(reply["choices"], pieces["choices"], strict=True):
        assert streamed["text"] == choice["text"]
        assert streamed["token_ids"] == choice["token_ids"]
        assert close(streamed["logprobs"], choice["logprobs"])
        assert streamed["finish"] == (choice["finish_reason"], choice["stop_reason"])
        count = len(choice["token_ids"]) + (len(PROMPT) if flags["echo"] else 0)
        assert {len(values) for values in choice["logprobs"].values()} == {count}
        tokens += len(choice["token_ids"])
        if choice["finish_reason"] == "stop" and isinstance(choice["stop_reason"], str):
            shown = flags["include_stop_str_in_output"]
            assert choice["text"].endswith(choice["stop_reason"]) or not shown
    for name, value in {"prompt_tokens": len(PROMPT), "completion_tokens": tokens}.items():
        assert reply["usage"][name] == pieces["usage"][name] == value
    other = whole(plain, body)
    for choice, undrafted in zip(reply["choices"], other["choices"], strict=True):
        for name in ("text", "token_ids", "finish_reason", "stop_reason"):
            assert choice[name] == undrafted[name]
        assert close(choice["logprobs"], undrafted["logprobs"])


#: every field of a body that changes which tokens come
FIELDS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.7},
    "greedy": {"temperature": 0},
    "top_p": {"top_p": 0.8},
    "top_k": {"top_k": 7},
    "min_p": {"min_p": 0.1},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": -1.0},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "logit_bias": {"logit_bias": {"5": 4, "9": -100}},
    "allowed_token_ids": {"allowed_token_ids": [1, *range(5, 40)]},
    "bad_words": {"bad_words": ["ab", "a", "日本", "👍", "stop"]},
    "min_tokens": {"min_tokens": 30, "logit_bias": {"1": 5}},
    "stop": {"stop": ["b", "日"]},
    "stop_token_ids": {"stop_token_ids": [5, 6, 7, 8]},
    "include_stop_str_in_output": {"stop": ["b"], "include_stop_str_in_output": True},
    "skip_special_tokens": {"skip_special_tokens": False, "logit_bias": {"2": 3}},
    "ignore_eos": {"ignore_eos": True, "logit_bias": {"1": 3}},
    "truncate_prompt_tokens": {"truncate_prompt_tokens": 4},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "n": {"n": 3},
    "structured_outputs": {"structured_outputs": {"regex": "[ab .]{50}"}},
}


@pytest.mark.parametrize("name", FIELDS)
def test_each_field_says_the_same_with_drafts_and_without(drafting: Served, plain: Served, name: str) -> None:
    body = {"prompt": PROMPT, "seed": 11, "max_tokens": 40, "return_token_ids": True, "ignore_eos": True}
    replies = [whole(served, body | FIELDS[name]) for served in (drafting, plain)]
    one, other = (reply["choices"] for reply in replies)
    for choice, undrafted in zip(one, other, strict=True):
        for each in ("token_ids", "text", "finish_reason", "stop_reason"):
            assert choice[each] == undrafted[each]
    assert replies[0]["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0


def test_forbidden_tokens_do_not_come(drafting: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 100, "return_token_ids": True, "ignore_eos": True, "n": 4}
    allowed = [5, 9, 14, 15, 26, 35]
    for choice in whole(drafting, body | {"allowed_token_ids": allowed})["choices"]:
        assert set(choice["token_ids"]) <= set(allowed)
    words = {"allowed_token_ids": [3, 4, 5, 6, 20, 21], "bad_words": ["ab", "日本"]}
    free = whole(drafting, body | {"allowed_token_ids": words["allowed_token_ids"], "seed": 1})["choices"]
    assert any("日本" in choice["text"] for choice in free)
    for choice in whole(drafting, body | words)["choices"]:
        pairs = list(zip(choice["token_ids"], choice["token_ids"][1:], strict=False))
        assert 5 not in choice["token_ids"], "the token that spells ab"
        assert (20, 21) not in pairs


def test_scored_prompts_are_the_models_own_also_when_cached(drafting: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "prompt_logprobs": 3}
    assert whole(drafting, body | {"prompt_logprobs": None})["usage"]["prompt_tokens"] == len(PROMPT)
    with torch.no_grad():
        logp = torch.log_softmax(reference()(torch.tensor([PROMPT])).logits[0], -1)
    for _ in range(2):
        reply = whole(drafting, body)
        first, *scores = reply["choices"][0]["prompt_logprobs"]
        assert first is None
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        for row, token, entry in zip(logp, PROMPT[1:], scores, strict=False):
            assert entry[str(token)]["logprob"] == pytest.approx(float(row[token]), abs=1e-4)
            best = {str(int(i)) for i in torch.topk(row, 3).indices}
            assert set(entry) == best | {str(token)}
    assert (
        whole(drafting, body | {"prompt_logprobs": None})["usage"]["prompt_tokens_details"]["cached_tokens"]
        == 8
    )


def test_a_context_filled_to_the_brim(drafting: Served) -> None:
    """Drafts near the end of the context crash some servers."""
    for left in range(1, 8):
        prompt = [3 + i % 50 for i in range(128 - left)]
        reply = drafting.post("/v1/completions", {"prompt": prompt, "max_tokens": 50})
        assert reply.json()["error"]["code"] == "context_length_exceeded"
        reply = drafting.post("/v1/completions", {"prompt": prompt, "max_tokens": left, "ignore_eos": True})
        assert reply.json()["choices"][0]["finish_reason"] == "length"
        assert reply.json()["usage"]["total_tokens"] == 128
    messages = [{"role": "user", "content": "ab" * 50}]
    chat = drafting.post("/v1/chat/completions", {"messages": messages, "ignore_eos": True}).json()
    assert chat["choices"][0]["finish_reason"] == "length"
    assert chat["usage"]["total_tokens"] == 128, "without a limit, chat may use the rest of the context"
    scored = drafting.post("/v1/completions", {"prompt": [5] * 128, "max_tokens": 0, "prompt_logprobs": 0})
    assert scored.status_code == 200
    assert len(scored.json()["choices"][0]["prompt_logprobs"]) == 128


def test_a_stream_interval_does_not_change_what_is_said(drafting: Served) -> None:
    body = {
        "prompt": PROMPT,
        "seed": 3,
        "max_tokens": 60,
        "logprobs": 1,
        "return_token_ids": True,
        "temperature": 2,
    }
    expected = whole(drafting, body)["choices"][0]
    served = Served(
        Settings(model="tiny", stream_interval=7), lambda metrics: tiny_engine(metrics, babbler(), "fixed:4")
    )
    try:
        (choice,) = in_pieces(served, body)["choices"]
        assert (choice["text"], choice["token_ids"]) == (expected["text"], expected["token_ids"])
        assert choice["logprobs"]["text_offset"] == expected["logprobs"]["text_offset"]
    finally:
        served.close()


def test_the_vocabulary_cuts_characters() -> None:
    """Else the tests above would show less than they say."""
    assert len(PIECES) == VOCAB
    halves = [piece for piece in PIECES if piece.decode(errors="replace").endswith("\ufffd")]
    assert len(halves) >= 10
