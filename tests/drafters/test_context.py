"""Context K/V that waits: every full page has it, and whoever is drafted for has all of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters.context import Context
from engine.batch import BatchItem, Verdict, VerificationBatch
from engine.params import SamplingParams
from engine.sampling import SamplingState

PAGE = 4


@dataclass
class Written:
    """What was written: of each page, position by position, the feature."""

    at: dict[tuple[int, int], float] = field(default_factory=dict)
    calls: int = 0

    def write_context(self, spans, features):
        self.calls += 1
        assert features.shape[0] == sum(span.count for span in spans)
        row = 0
        for span in spans:
            for position in range(span.start, span.start + span.count):
                self.at[int(span.pages[position // PAGE]), position] = float(features[row])
                row += 1


def step(context: Context, rows: list[tuple[int, int, int, int, int]]) -> dict[tuple[int, int], float]:
    """(sequence, start, known rows, verified, accepted) each; returns what is final now."""
    items, verdicts, features, final = [], [], [], {}
    for sequence, start, known, verify, accepted in rows:
        state = SamplingState(SamplingParams(), 8, frozenset())
        pages = np.arange(8, dtype=np.int32) + 8 * (sequence % 8)
        count = known + verify
        items.append(
            BatchItem(sequence, np.zeros(99, np.int32), start, count, pages, True, state, 9, 0, None, verify)
        )
        verdicts.append(Verdict(tuple(range(accepted + 1)), accepted))
        for position in range(start, start + count):
            value = 100.0 * sequence + position
            rejected = position >= start + known + accepted
            features.append(-1.0 if rejected else value)
            if not rejected:
                final[int(pages[position // PAGE]), position] = value
    context.observe(VerificationBatch(tuple(items)), torch.tensor(features)[:, None], verdicts)
    return final


moves = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), min_size=1, max_size=9)


@given(st.lists(moves, min_size=2, max_size=3), st.integers(1, 5))
@settings(max_examples=200, deadline=None)
def test_full_pages_are_written_and_so_is_all_that_a_draft_sees(texts, prompt):
    """Sequences of a prompt and rounds: (verified, of them accepted at most, drafted for afterwards)."""
    written = Written()
    context = Context(written, PAGE)
    final: dict[tuple[int, int], float] = {}
    ends = [0] * len(texts)
    for number in range(-1, max(map(len, texts))):
        rows, ask = [], []
        for sequence, rounds in enumerate(texts):
            if number < 0:
                rows.append((sequence, 0, prompt, 0, 0))
                ends[sequence] = prompt
            elif number < len(rounds):
                verify, most, drafted = rounds[number]
                accepted = min(verify, most)
                rows.append((sequence, ends[sequence], 1, verify, accepted))
                ends[sequence] += 1 + accepted
                if drafted:
                    ask.append(sequence)
        final |= step(context, rows)
        context.complete(ask)
        for (page, position), value in final.items():
            sequence = page // 8
            full = position < ends[sequence] // PAGE * PAGE
            if full or sequence in ask:
                assert written.at[page, position] == value
        assert set(written.at.items()) <= set(final.items())  # nothing rejected, nothing misplaced


def test_rows_wait_for_their_page_and_go_together():
    written = Written()
    context = Context(written, PAGE)
    for start in range(3):
        step(context, [(0, start, 1, 0, 0), (1, start, 1, 0, 0)])
    assert written.calls == 0
    step(context, [(0, 3, 1, 0, 0), (1, 3, 1, 0, 0)])
    assert written.calls == 1
    assert len(written.at) == 8


def test_what_waits_for_a_sequence_that_is_gone_or_starts_anew_is_not_written():
    written = Written()
    context = Context(written, PAGE)
    step(context, [(0, 0, 2, 0, 0), (1, 0, 2, 0, 0)])
    step(context, [(1, 2, 1, 0, 0)])
    step(context, [(0, 2, 1, 0, 0), (1, 0, 1, 0, 0)])  # 0 was away, 1 was preempted
    context.complete([0, 1])
    assert set(written.at.values()) == {2.0, 100.0}


def test_pages_that_went_to_another_sequence_get_only_its_rows():
    written = Written()
    context = Context(written, PAGE)
    step(context, [(0, 0, 3, 0, 0), (1, 0, 1, 0, 0)])
    step(context, [(8, 0, 3, 0, 0), (1, 1, 1, 0, 0)])  # 0 has ended, its pages are 8's now
    step(context, [(8, 3, 1, 0, 0), (1, 2, 1, 0, 0)])
    assert [written.at[0, position] for position in range(PAGE)] == [800.0, 801.0, 802.0, 803.0]
    assert len(written.at) == PAGE


def test_short_texts_that_never_fill_a_page_leave_nothing_behind():
    written = Written()
    context = Context(written, PAGE)
    for sequence in range(100):
        step(context, [(sequence, 0, 2, 0, 0)])
        assert len(context._steps) < PAGE
        assert len(context._waiting) <= 1
    assert written.calls == 0
