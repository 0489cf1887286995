"""Measuring what steps cost, with dummy sequences on the real executor and drafter, before serving."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import numpy as np

from engine.batch import BatchItem, DraftBlock, VerificationBatch
from engine.params import SamplingParams
from engine.sampling import SamplingState
from engine.worker import Worker
from scheduler.throughput import Curve, Throughput

_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_SEQUENCES = (2, 4, 8, 16, 32, 64, 128)
_REPEATS = 3
_DRAFT_SLOTS = 3  # of the drafts that are timed for many: where it matters, whole blocks are not drafted

Progress = Callable[[str], None]


class Profiler:
    """`context` tokens lie before each dummy sequence's rows; its pages are the pool's own, before their use.

    `gamma` is how many tokens a model drafts (0: there is none), `block` how many a block may have.
    """

    def __init__(
        self,
        worker: Worker,
        vocab: int,
        num_pages: int,
        page_size: int,
        gamma: int,
        block: int,
        context: int = 256,
    ) -> None:
        self.worker, self.vocab, self.gamma, self.block = worker, vocab, gamma, block
        self.pages_each = -(-(context + 2 * block + 8) // page_size)
        if self.pages_each > num_pages:  # a tiny pool: as much context as there is room for
            self.pages_each = num_pages
        self.context = max(1, self.pages_each * page_size - 2 * block - 8)
        self.num_pages = num_pages
        self._history = np.arange(self.context + 1, dtype=np.int32) % vocab

    def run(self, most_rows: int, most_sequences: int, progress: Progress = lambda line: None) -> Throughput:
        """Verification over rows up to `most_rows`, drafting for up to `most_sequences`."""
        rows = [*(size for size in _ROWS if size < most_rows), most_rows]
        self._time(rows[-1], 0)  # first touches: memory, threads, caches
        verify = [(size, self._time(size, 0)[0]) for size in rows]
        per_context = self._context_cost(verify[0][1])
        # A point holds one sequence's context, however many the profile needed for its rows.
        more = [per_context * self.context * (-(-size // (1 + self.block)) - 1) for size in rows]
        verify = [(size, max(each - beyond, 1e-6)) for (size, each), beyond in zip(verify, more, strict=True)]
        progress(f"profile: 1 row {1e3 * verify[0][1]:.1f} ms, {rows[-1]} rows {1e3 * verify[-1][1]:.1f} ms")
        draft = [(1, 0.0)]
        if self.gamma:
            drafts = self._drafts(most_sequences)
            draft = [(size, self._time(*drafts[size])[1]) for size in sorted(drafts)]
            progress(
                f"profile: drafting {draft[0][0]} token {1e3 * draft[0][1]:.1f} ms, "
                f"{draft[-1][0]} tokens {1e3 * draft[-1][1]:.1f} ms"
            )
        return Throughput(Curve(verify), Curve(draft), per_context, float(self.context))

    def _drafts(self, most_sequences: int) -> dict[int, tuple[int, int]]:
        """(sequences, tokens each) of the drafts that are timed, by tokens in all."""
        slots = min(self.gamma, _DRAFT_SLOTS)
        several = [*(count for count in _SEQUENCES if count < most_sequences), most_sequences]
        sizes = [(count, slots) for count in several] + [(most_sequences, self.gamma)]
        sizes += [(1, each) for each in (1, 2, 3, self.gamma) if each <= self.gamma]
        return {count * each: (count, each) for count, each in sizes}

    def _context_cost(self, one_row: float) -> float:
        """Seconds for each further token that attention reads."""
        if self.context < 32:
            return 0.0
        short = self._time(1, 0, self.context // 8)[0]
        return max(0.0, (one_row - short) / (self.context - self.context // 8))

    def _time(self, rows: int, slots: int, context: int | None = None) -> tuple[float, float]:
        """Medians of (forward, draft) seconds of a step of `rows` rows."""
        results = [self.worker.run(self._batch(rows, slots, context)) for _ in range(_REPEATS)]
        return median(r.forward_time for r in results), median(r.draft_time for r in results)

    def _batch(self, rows: int, slots: int, context: int | None) -> VerificationBatch:
        """Sequences of up to 1 + block rows each, or of one row each where drafting is timed."""
        start = self.context if context is None else context
        each = 1 if slots else 1 + self.block
        items = []
        for number, first in enumerate(range(0, rows, each)):
            verify = min(each, rows - first) - 1
            block = DraftBlock(tuple(range(verify))) if verify else None
            at = number * self.pages_each
            pages = (at + np.arange(self.pages_each, dtype=np.int32)) % self.num_pages
            state = SamplingState(SamplingParams(temperature=0.0, ignore_eos=True), self.vocab, frozenset())
            items.append(
                BatchItem(
                    sequence=-1 - number,
                    history=self._history[: start + 1],
                    start=start,
                    count=1 + verify,
                    pages=pages.astype(np.int32),
                    sample=True,
                    state=state,
                    budget=1 << 20,
                    round=0,
                    draft=block,
                    verify=verify,
                    draft_slots=slots,
                )
            )
        return VerificationBatch(tuple(items))
