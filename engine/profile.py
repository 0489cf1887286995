"""Measuring what steps cost, with dummy sequences on the real executor and drafter, before serving."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np

from engine.batch import BatchItem, DraftBlock, StepResult, VerificationBatch
from engine.params import SamplingParams
from engine.sampling import SamplingState
from engine.worker import Worker
from scheduler.curve import Curve
from scheduler.throughput import Throughput

# Every size where a kink decides: kernels take rows by fours, and the fifth costs what three do before it.
_ROWS = (*range(1, 11), 12, 13, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
_SEQUENCES = (2, 4, 8, 16, 32, 64, 128)
_TURNS, _SECONDS = 7, 5.0  # each size is timed so often, or until so much time is gone
_BEYOND = 256  # rows between two points past the last bucket
_DRAFT_SLOTS = 3  # of the drafts that are timed for many: where it matters, whole blocks are not drafted

_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)

Progress = Callable[[str], None]
_Step = tuple[int, int, int]  # rows, slots for each, context


class Profiler:
    """`context` tokens lie before each dummy sequence's rows; its pages are the pool's own, before their use.

    `gamma` is how many tokens a model drafts (0: there is none), `block` how many a block may have. `buckets`
    are the sizes that the executor pads steps to, if it does.
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
        buckets: Sequence[int] = (),
    ) -> None:
        self.buckets = buckets
        self.worker, self.vocab, self.gamma, self.block = worker, vocab, gamma, block
        self.pages_each = -(-(context + 2 * block + 8) // page_size)
        if self.pages_each > num_pages:  # a tiny pool: as much context as there is room for
            self.pages_each = num_pages
        self.context = max(1, self.pages_each * page_size - 2 * block - 8)
        self.num_pages, self.page_size = num_pages, page_size
        self._history = np.arange(self.context + 1, dtype=np.int32) % vocab

    def run(self, most_rows: int, most_sequences: int, progress: Progress = lambda line: None) -> Throughput:
        """Verification over rows up to `most_rows`, drafting for up to `most_sequences`."""
        rows = self._sizes(most_rows)
        drafts = self._drafts(most_sequences) if self.gamma else {}
        steps: dict[tuple[str, int], _Step] = {("rows", size): (size, 0, self.context) for size in rows}
        steps |= {("short", 1): (1, 0, self.context // 8)} if self.context >= 32 else {}
        steps |= {("draft", size): (*drafts[size], self.context) for size in sorted(drafts)}
        self.worker.run(self._batch(rows[-1], 0, self.context))  # first touches: memory, threads, caches
        seconds = self._time(steps)
        verify = [(size, seconds["rows", size][0]) for size in rows]
        per_context = 0.0
        if ("short", 1) in seconds:
            longer = self.context - self.context // 8
            per_context = max(0.0, (verify[0][1] - seconds["short", 1][0]) / longer)
        # A point holds one sequence's context, however many the profile needed for its rows.
        more = [per_context * self.context * (-(-size // (1 + self.block)) - 1) for size in rows]
        verify = [(size, max(each - beyond, 1e-6)) for (size, each), beyond in zip(verify, more, strict=True)]
        progress(f"profile: 1 row {1e3 * verify[0][1]:.1f} ms, {rows[-1]} rows {1e3 * verify[-1][1]:.1f} ms")
        draft = [(size, seconds["draft", size][1]) for size in sorted(drafts)] or [(1, 0.0)]
        if drafts:
            progress(
                f"profile: drafting {draft[0][0]} token {1e3 * draft[0][1]:.1f} ms, "
                f"{draft[-1][0]} tokens {1e3 * draft[-1][1]:.1f} ms"
            )
        return Throughput(
            Curve(verify, staircase=bool(self.buckets)), Curve(draft), per_context, float(self.context)
        )

    def rehearse(self, rows: int, prompt_rows: int, sequences: int) -> None:
        """The largest steps that there can be: verification, a prompt, drafting; sampled with filters."""
        params = SamplingParams(temperature=1.0, top_p=0.9, ignore_eos=True)
        pages = (np.arange(-(-prompt_rows // self.page_size)) % self.num_pages).astype(np.int32)
        state = SamplingState(params, self.vocab, frozenset())
        history = np.zeros(prompt_rows, dtype=np.int32)
        prompt = BatchItem(-1, history, 0, prompt_rows, pages, True, state, 1 << 20, 0)
        self.worker.run(VerificationBatch((prompt,)))
        self.worker.run(self._batch(rows, 0, self.context, params))
        if self.gamma:
            self.worker.run(self._batch(sequences, self.gamma, self.context, params))

    def _sizes(self, most_rows: int) -> list[int]:
        """Rows of the steps that are timed."""
        known = [*self.buckets] or [*_ROWS]
        if self.buckets:
            known += range(known[-1] + _BEYOND, most_rows, _BEYOND)
        return [*(size for size in known if size < most_rows), most_rows]

    def _drafts(self, most_sequences: int) -> dict[int, tuple[int, int]]:
        """(sequences, tokens each) of the drafts that are timed, by tokens in all."""
        slots = min(self.gamma, _DRAFT_SLOTS)
        several = [*(count for count in _SEQUENCES if count < most_sequences), most_sequences]
        sizes = [(count, slots) for count in several] + [(most_sequences, self.gamma)]
        sizes += [(1, each) for each in (1, 2, 3, self.gamma) if each <= self.gamma]
        return {count * each: (count, each) for count, each in sizes}

    def _time(self, steps: Mapping[tuple[str, int], _Step]) -> dict[tuple[str, int], tuple[float, float]]:
        """Medians of (forward, draft) seconds of each step.

        All of them in turn, then again: a slow moment must not fall upon one size.
        """
        found: dict[tuple[str, int], list[StepResult]] = {name: [] for name in steps}
        begun, turns = time.perf_counter(), 0
        while not turns or (turns < _TURNS and time.perf_counter() - begun < _SECONDS):
            for name, step in steps.items():
                found[name].append(self.worker.run(self._batch(*step)))
            turns += 1
        return {
            name: (median(r.forward_time for r in results), median(r.draft_time for r in results))
            for name, results in found.items()
        }

    def _batch(
        self, rows: int, slots: int, start: int, params: SamplingParams = _GREEDY
    ) -> VerificationBatch:
        """Sequences of up to 1 + block rows each, or of one row each where drafting is timed."""
        each = 1 if slots else 1 + self.block
        items = []
        for number, first in enumerate(range(0, rows, each)):
            verify = min(each, rows - first) - 1
            block = DraftBlock(tuple(range(verify))) if verify else None
            at = number * self.pages_each
            pages = (at + np.arange(self.pages_each, dtype=np.int32)) % self.num_pages
            state = SamplingState(params, self.vocab, frozenset())
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
