"""What looked-up tokens are expected to do: by the length of the match, and in each text of late."""

from __future__ import annotations

import pytest

from drafters.lookup_record import LookupRecord


def rounds(record: LookupRecord, sequence: int, match: int, accepted: int, times: int, greedy: bool = True):
    for _ in range(times):
        record.chances(sequence, match, 4, greedy)
        record.observe(sequence, min(accepted + 1, 4), accepted)


def test_longer_matches_are_told_apart_and_a_block_goes_on_as_a_longer_match():
    record = LookupRecord()
    for sequence in range(200):
        rounds(record, sequence, 2, 0, 1)  # never
        rounds(record, 1000 + sequence, 5, 4, 1)  # always
    chances = record.chances(5000, 2, 5, True)
    assert chances[0] < 0.1
    assert chances[3] > 0.9  # as of a match of 5
    assert record.chances(5001, 2, 1, False)[0] == pytest.approx(0.4)  # sampled texts are another matter


def test_a_text_is_believed_before_the_others_and_forgives():
    record = LookupRecord()
    for sequence in range(100):
        rounds(record, sequence, 3, 4, 1)
    usual = record.chances(7777, 3, 1, True)[0]
    rounds(record, 7777, 3, 0, 6)
    bad = record.chances(7777, 3, 1, True)[0]
    assert bad < 0.6 * usual
    for _ in range(30):  # proposed, never verified
        again = record.chances(7777, 3, 1, True)[0]
    assert again > 0.85 * usual


def test_a_token_behind_the_first_rejection_was_never_tried():
    record = LookupRecord()
    record.chances(1, 2, 4, True)
    record.observe(1, 2, 1)
    assert record._tried[1] == [0, 0, 1, 1, *[0] * 9]
    assert record._accepted[1] == [0, 0, 1, 0, *[0] * 9]


def test_what_is_rare_stays_what_it_was_assumed_to_be():
    record = LookupRecord()
    rounds(record, 1, 2, 0, 20_000)
    assert record.chances(2, 9, 1, True)[0] == pytest.approx(0.9)
    rounds(record, 3, 9, 0, 1)
    assert record.chances(4, 9, 1, True)[0] > 0.6  # one miss is not the end


def test_texts_do_not_pile_up_and_unknown_ones_are_ignored():
    record = LookupRecord()
    record.observe(3, 4, 4)
    for sequence in range(5000):
        record.chances(sequence, 2, 1, True)
    assert len(record._texts) == 4096
