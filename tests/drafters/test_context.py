"""Context K/V that waits: whoever is drafted for has all of it, and who comes finds full pages written."""

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
        if start + known + verify > 8 * PAGE:
            pages = np.arange(1000, 1200, dtype=np.int32)
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
def test_full_pages_are_written_when_anybody_comes_or_goes_and_so_is_all_that_a_draft_sees(texts, prompt):
    """Sequences of a prompt and rounds: (verified, of them accepted at most, drafted for afterwards)."""
    written = Written()
    context = Context(written, PAGE)
    final: dict[tuple[int, int], float] = {}
    ends: dict[int, int] = {}
    before: list[int] = []
    last = max(map(len, texts))
    for number in range(-1, last + 1):
        rows, ask = [], []
        for sequence, rounds in enumerate(texts):
            if number < 0:
                rows.append((sequence, 0, prompt, 0, 0))
            elif number < len(rounds):
                verify, most, drafted = rounds[number]
                rows.append((sequence, ends[sequence], 1, verify, min(verify, most)))
                if drafted:
                    ask.append(sequence)
        if number == last:
            rows.append((len(texts), 0, 1, 0, 0))
        full = {at for at in final if at[1] < ends[at[0] // 8] // PAGE * PAGE}
        for sequence, start, known, _, accepted in rows:
            ends[sequence] = start + known + accepted
        final |= step(context, rows)
        context.complete(ask)
        assert all(written.at[at] == value for at, value in final.items() if at[0] // 8 in ask)
        if [sequence for sequence, *_ in rows] != before:
            assert full <= written.at.keys()
        before = [sequence for sequence, *_ in rows]
        assert set(written.at.items()) <= set(final.items())  # nothing rejected, nothing misplaced


def test_rows_go_together_after_so_many_steps_or_rows_or_when_somebody_comes():
    written = Written()
    context = Context(written, PAGE)
    for start in range(3):
        step(context, [(0, 3 + start, 1, 0, 0), (1, start, 1, 0, 0)])
    assert written.calls == 0  # though 0 has filled a page
    step(context, [(0, 6, 1, 0, 0), (1, 3, 1, 0, 0)])
    assert written.calls == 1
    assert len(written.at) == 8
    step(context, [(0, 7, 1, 0, 0), (1, 4, 1, 0, 0)])
    assert written.calls == 1
    step(context, [(0, 8, 1, 0, 0), (2, 4, 1, 0, 0), (1, 5, 1, 0, 0)])
    assert written.calls == 2
    assert (0 + 7 // PAGE, 7) in written.at
    step(context, [(3, 0, 31, 0, 0), (4, 0, 31, 0, 0), (5, 0, 31, 0, 0), (6, 0, 31, 0, 0), (7, 0, 4, 0, 0)])
    assert written.calls == 3
    assert len(written.at) == 9 + 4 * 31 + 4


def test_what_waits_for_a_sequence_that_is_gone_or_starts_anew_is_not_written():
    written = Written()
    context = Context(written, PAGE)
    step(context, [(0, 0, 2, 0, 0), (1, 0, 2, 0, 0)])
    step(context, [(1, 2, 1, 0, 0)])
    step(context, [(0, 2, 1, 0, 0), (1, 0, 1, 0, 0)])  # 0 was away, 1 was preempted
    context.complete([0, 1])
    assert set(written.at.values()) == {2.0, 100.0}


def test_pages_that_went_to_another_sequence_hold_its_rows():
    written = Written()
    context = Context(written, PAGE)
    step(context, [(0, 0, 5, 0, 0), (1, 0, 1, 0, 0)])
    step(context, [(8, 0, 3, 0, 0), (1, 1, 1, 0, 0)])  # 0 has ended, its pages are 8's now
    assert [written.at[0, position] for position in range(PAGE)] == [0.0, 1.0, 2.0, 3.0]  # not too late
    step(context, [(8, 3, 1, 0, 0), (1, 2, 1, 0, 0)])
    context.complete([8])
    assert [written.at[0, position] for position in range(PAGE)] == [800.0, 801.0, 802.0, 803.0]


def test_short_texts_that_never_fill_a_page_leave_nothing_behind():
    written = Written()
    context = Context(written, PAGE)
    for sequence in range(100):
        step(context, [(sequence, 0, 2, 0, 0)])
        assert len(context._steps) < PAGE
        assert len(context._waiting) <= 1
    assert written.calls == 0


def test_a_step_of_many_rows_is_not_kept_alive_for_a_few():
    written = Written()
    context = Context(written, PAGE)
    step(context, [(0, 0, 1, 0, 0), (1, 0, 200, 0, 0)])
    step(context, [(0, 1, 1, 0, 0), (1, 200, 200, 0, 0)])
    assert all(len(known) == 1 for known, _, _ in context._waiting[0].pieces)
    context.complete([0])
    assert [written.at[0, position] for position in range(2)] == [0.0, 1.0]
