"""The items of a response are the same however its text is cut, and its events tell of them one by one."""

from __future__ import annotations

import itertools
import json
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from server.responses_items import Event, OutputItems
from server.text_splitter import TextSplitter
from server.tool_formats import FORMATS, HERMES, MISTRAL_ARGS, ToolFormat
from tests.server.test_text_splitter import ADD, FRAGMENTS, TOOLS, WEATHER, split

Items = list[dict[str, Any]]


def written(pieces: list[str], form: ToolFormat | None, **how: bool) -> tuple[Items, list[Event]]:
    """The items of an answer that comes in these pieces, and all events."""
    items = OutputItems("x", TextSplitter(form, TOOLS, **how), form)
    events = [event for piece in pieces for event in items.add(piece, ())]
    events += items.end("completed")
    return items.done, events


def without_call_ids(items: Items) -> Items:
    return [{key: value for key, value in item.items() if key != "call_id"} for item in items]


def told(events: list[Event]) -> Items:
    """The items as a client puts them together from the deltas, checked against all that is repeated."""
    items: Items = []
    part: dict[str, Any] = {}
    before = "output_item.done"
    for kind, fields in events:
        assert fields["output_index"] == len(items) - (kind != "output_item.added")
        if kind == "output_item.added":
            assert before == "output_item.done"
            items.append(fields["item"])
            assert items[-1]["status"] == "in_progress"
            assert not items[-1].get("content")
            part = items[-1]
        elif kind == "output_item.done":
            items[-1]["status"] = "completed"
            assert fields["item"] == items[-1]
        else:
            assert fields["item_id"] == items[-1]["id"]
            assert fields.get("content_index", 0) == 0
            if kind == "content_part.added":
                part = fields["part"]
                items[-1]["content"] = [part]
            elif kind == "content_part.done":
                assert fields["part"] == part
            else:
                key = "arguments" if kind.startswith("function_call") else "text"
                if kind.endswith(".delta"):
                    part[key] += fields["delta"]
                else:
                    assert kind.endswith(".done")
                    assert fields[key] == part[key]
        before = kind
    return items


@settings(deadline=None)
@given(
    texts=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=12),
    cuts=st.lists(st.integers(0, 400), max_size=30),
    form=st.sampled_from([None, *FORMATS.values()]),
    thinks=st.booleans(),
    thinking=st.booleans(),
)
@example(["<tool_call>", WEATHER, "</tool_call>", "so"], [20, 60], HERMES, False, False)
@example(["[TOOL_CALLS]", "add", "[ARGS]", "{}", "[TOOL_CALLS]"], [3, 14, 20], MISTRAL_ARGS, False, False)
def test_any_cutting_gives_the_same_items_and_events_that_tell_of_them(
    texts: list[str], cuts: list[int], form: ToolFormat | None, thinks: bool, thinking: bool
) -> None:
    text = "".join(texts)
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    how = {"thinks": thinks, "thinking": thinking}
    items, events = written(pieces, form, **how)
    assert told(events) == items
    assert without_call_ids(items) == without_call_ids(written([text], form, **how)[0])
    said: list[tuple[str, str]] = []
    for item in items:
        if item["type"] == "function_call":
            said += [("call", item["name"]), ("arguments", item["arguments"])]
        else:
            kind = "reasoning" if item["type"] == "reasoning" else "content"
            said.append((kind, item["content"][0]["text"]))
    parts = split([text], form, **how)
    assert [each for each in said if each[1]] == [each for each in parts if each[1]]
    assert said, "there is always something"


def test_thoughts_text_and_calls_are_items_in_their_order() -> None:
    text = f"<think>Hm.</think>So.\n<tool_call>\n{ADD}\n</tool_call>\n<tool_call>\n{ADD}\n</tool_call>\nDone."
    items, _ = written([text], HERMES, thinks=True)
    kinds = ["reasoning", "message", "function_call", "function_call", "message"]
    assert [item["type"] for item in items] == kinds
    assert [item["id"] for item in items] == ["rs_x_0", "msg_x_1", "fc_x_2", "fc_x_3", "msg_x_4"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert items[2]["name"] == "add"
    assert json.loads(items[2]["arguments"]) == {"a": {"b": {}}, "c": []}
    assert items[2]["call_id"] != items[3]["call_id"]


def test_an_answer_without_text_is_an_empty_message() -> None:
    items, events = written([], None)
    assert [item["type"] for item in items] == ["message"]
    assert items[0]["content"][0]["text"] == ""
    assert told(events) == items


def test_what_is_cut_is_incomplete_and_only_that() -> None:
    items = OutputItems("x", TextSplitter(HERMES, TOOLS), HERMES)
    items.add('So. <tool_call>{"name": "add", "arguments": {"a"', ())
    items.end("incomplete")
    assert [item["status"] for item in items.done] == ["completed", "incomplete"]
    assert items.done[1]["arguments"] == '{"a"'


def test_logprobs_of_a_message_are_all_of_its_tokens() -> None:
    """Also those that are half a character."""
    items = OutputItems("x", TextSplitter(), None)
    entries = [{"token": str(i)} for i in range(4)]
    events = [
        event
        for entry, text in zip(entries, ("a", "", "é", "b"), strict=True)
        for event in items.add(text, [entry])
    ]
    assert [fields["logprobs"] for kind, fields in events if kind.endswith("delta")] == [
        [each] for each in entries
    ]
    items.end("completed")
    assert items.done[0]["content"][0]["logprobs"] == entries
