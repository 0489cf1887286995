"""The scanner takes exactly what a JSON parser takes, and notices the first character that is wrong."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from server.json_scanner import JsonScanner

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=3), VALUES, max_size=4)


def read(text: str) -> tuple[int, bool]:
    """(characters that were fine, whether the object is complete)"""
    scanner = JsonScanner()
    for place, char in enumerate(text):
        if scanner.done or not scanner.feed(char):
            return place, scanner.done
    return len(text), scanner.done


@settings(deadline=None)
@given(OBJECTS, st.sampled_from([None, 0, 2]), st.booleans())
def test_every_object_is_read_to_its_end(value: dict[str, Any], indent: int | None, ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii)
    assert read(text) == (len(text), True)
    for end in range(len(text)):
        assert read(text[:end]) == (end, False)


@settings(deadline=None)
@given(OBJECTS, st.data())
def test_a_changed_character_is_judged_as_the_parser_judges_it(
    value: dict[str, Any], data: st.DataObject
) -> None:
    text = json.dumps(value)
    place = data.draw(st.integers(1, len(text) - 1))
    other = data.draw(st.sampled_from('{}[]",:\\ntf01-+.eE x\n'))
    changed = text[:place] + other + text[place + 1 :]
    try:
        json.loads(changed)
        valid = True
    except ValueError:
        valid = False
    assert (read(changed) == (len(changed), True)) == valid


@settings(deadline=None)
@given(OBJECTS)
def test_members_of_the_top_level_are_named_while_they_are_read(value: dict[str, Any]) -> None:
    text = json.dumps(value)
    scanner, seen = JsonScanner(), dict.fromkeys(value, "")
    for char in text:
        before = scanner.member
        assert scanner.feed(char)
        member = before if before is not None else scanner.member
        if member is not None:
            seen[member] += char
    # A number ends with the character behind it, which is no part of it.
    assert {key: json.loads(said.rstrip(",} ")) if type(value[key]) in (int, float) else json.loads(said)
            for key, said in seen.items()} == value  # fmt: skip
