from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.sse import EventParser

BODY = b': ping\n\ndata: {"a": 1}\n\nevent: x\ndata:two\ndata: lines\n\nid: 7\n\ndata: [DONE]\n\n'
EVENTS = [b'{"a": 1}', b"two\nlines", b"[DONE]"]


@given(st.data(), st.sampled_from([b"\n", b"\r\n", b"\r"]), st.booleans())
def test_cut_anywhere_it_is_the_same(data: st.DataObject, end: bytes, marked: bool) -> None:
    body = (b"\xef\xbb\xbf" if marked else b"") + BODY.replace(b"\n", end)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=12)))
    parser, events = EventParser(), []
    for begin, stop in zip([0, *cuts], [*cuts, len(body)], strict=True):
        events += parser.feed(body[begin:stop])
    events += parser.feed(b"\n")  # a trailing carriage return may have been half a line end
    assert events == EVENTS


@pytest.mark.parametrize("tail", [b"data: half", b"data: whole line\n"])
def test_an_event_without_its_blank_line_is_none(tail: bytes) -> None:
    parser = EventParser()
    assert parser.feed(b"data: a\n\n" + tail) == [b"a"]
