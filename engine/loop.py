"""The engine's step: plan, select, latch; one worker call; commit.

    begin    plan    who prefills which chunk, who decodes            (scheduler.admission)
             select  how far each drafted block is verified           (engine.speculation)
             latch   a frozen VerificationBatch, with the draft plan
    worker   verify, then draft                                       (engine.worker, off the event loop)
    commit   tokens, text, pages, ends

Between `begin` and `commit` nothing changes the composition of the batch: aborts are only noted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from engine.batch import BatchItem, DraftBlock, StepResult, Verdict, VerificationBatch
from engine.emission import FAULTS, Emission, emit
from engine.intake import Intake
from engine.outputs import (
    EngineGauges,
    EngineObserver,
    FinishReason,
    OutputDelta,
)
from engine.page_table import PageTable
from engine.pages import PagePool
from engine.params import ParamError
from engine.request import ActiveRequest, Request
from engine.sequence import Sequence, Status, insert
from engine.speculation import Slots, Speculation, Step
from engine.step_stats import Latch, step_stats
from scheduler.admission import Limits, Running, StepPlan, Waiting, plan_step

Delta = tuple[ActiveRequest, OutputDelta]

#: how far down the queue a step looks for a sequence that fits
_SCAN_DEPTH = 64


class EngineLoop:
    """Owns sequences and pages. Single-threaded: call from one thread, the worker runs beside it."""

    def __init__(
        self,
        pool: PagePool,
        intake: Intake,
        speculation: Speculation,
        limits: Limits,
        observer: EngineObserver,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pool = pool
        self.table = PageTable(pool, intake.max_model_len)
        self.intake = intake
        self.speculation = speculation
        self.limits = limits
        self.observer = observer
        self.clock = clock
        self.requests: dict[str, ActiveRequest] = {}
        self.running: list[Sequence] = []  # in order of rank
        self.waiting: list[Sequence] = []  # in order of rank
        self.seated = 0  # so far, each at its first time
        self._owner: dict[int, ActiveRequest] = {}
        self._in_flight: VerificationBatch | None = None
        self._latched: Latch | None = None
        self._aborted: list[Delta] = []

    # ---- requests come and go

    def add(self, request: Request) -> ActiveRequest:
        """Queue a request. Raises ParamError when it can never run or its id is in use."""
        if request.request_id in self.requests:
            raise ParamError("request_id", f"request id {request.request_id!r} is in use")
        active = self.intake.accept(request, self.clock())
        self.requests[request.request_id] = active
        for sequence in active.sequences:
            self._owner[sequence.key] = active
            insert(self.waiting, sequence)
        return active

    def abort(self, request_id: str) -> None:
        """End a request's unfinished choices: now, or at commit for those in the step in flight."""
        active = self.requests.get(request_id)
        if active is None:
            return
        flying = {item.sequence for item in self._in_flight.items} if self._in_flight else set()
        for sequence in active.sequences:
            sequence.aborted = True
            if sequence.key not in flying and sequence.status is not Status.FINISHED:
                self._aborted.append(self._end(sequence, "abort"))

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self._aborted)

    @property
    def held(self) -> bool:
        """Whether anyone who waits could run, if there were room."""
        return any(not self._follows(sequence) for sequence in self.waiting)

    def gauges(self) -> EngineGauges:
        pool = self.pool
        return EngineGauges(
            running=len(self.running),
            waiting=len(self.waiting),
            queued_tokens=sum(sequence.pending for sequence in self.waiting),
            kv_usage=1.0 - pool.available / pool.num_pages,
            pages_free=pool.free_count,
            pages_cached=pool.cached_count,
            pages_total=pool.num_pages,
            calibration_errors=self.speculation.survival.errors(),
            collapsed=self.speculation.plan.collapsed,
        )

    # ---- before the worker: plan, select, latch

    def begin(self) -> VerificationBatch | None:
        """Latch the next step; None if nothing can run now."""
        assert self._in_flight is None, "a step is in flight"
        begun = time.perf_counter()
        plan = self._plan()
        members = [sequence for sequence in self.running if sequence.key in plan.rows]
        if not members:
            return None
        decoding = sum(sequence.pending == 1 for sequence in members)
        load = decoding / self.limits.max_sequences
        sampling = [each for each in members if plan.rows[each.key] == each.pending]
        wanted = self._draft_slots(members, sampling, plan)
        step = Step(sum(plan.rows.values()), len(sampling), plan.spare_rows)
        lengths = self.speculation.lengths(members, step, wanted, load)
        spare = plan.spare_pages - len(self.running)  # a page each, for the anchors of the next step
        items, short = [], False
        for sequence, verify, slots in zip(members, lengths, wanted, strict=True):
            rows = plan.rows[sequence.key]
            if slots:  # reserve for the anchor and the whole block, before anything is drafted
                taken = self.table.reserve(sequence, rows + verify + 1 + slots.most, spare)
                if taken is None:
                    slots, short = Slots(), True
                else:
                    spare -= taken
            items.append(self._latch(sequence, rows, verify, slots))
        self._in_flight = VerificationBatch(tuple(items))
        self._latched = Latch(
            begun,
            time.perf_counter() - begun,
            plan.spare_rows,
            tuple(len(sequence.draft or ()) for sequence in members),
            self.speculation.undrafted(self._in_flight, short),
        )
        return self._in_flight

    def _plan(self) -> StepPlan:
        """Ask the scheduler, and give every sequence the pages that its rows need."""
        table, available = self.table, self.pool.available
        missing = [table.missing(sequence, sequence.pending) for sequence in self.running]
        short = sum(missing) > available  # only then may someone have to go, and what that frees matters
        work = [
            Running(
                sequence.key,
                sequence.pending,
                missing=lacks,
                surplus=table.surplus(sequence),
                reclaimable=table.reclaimable(sequence) if short else 0,
                scored=sequence.unscored,
            )
            for sequence, lacks in zip(self.running, missing, strict=True)
        ]
        plan = plan_step(work, self._candidates(), available, self.limits)
        by_key = {sequence.key: sequence for sequence in (*self.running, *self.waiting)}
        if plan.shed:
            for sequence in self.running:
                table.shed(sequence)
        for key in plan.preempted:
            self._preempt(by_key[key])
        for sequence in self.running:
            if sequence.key in plan.rows:
                table.grow(sequence, sequence.pending)
        for key in plan.admitted:
            self._admit(by_key[key])
        return plan

    def _candidates(self) -> Iterator[Waiting]:
        """Waiting sequences that could start now, with what the prefix cache holds for them."""
        now = self.clock()
        for sequence in islice(self.waiting, _SCAN_DEPTH):
            if self._follows(sequence):
                continue
            owner = self._owner[sequence.key]
            pending, pages = self.table.probe(sequence)
            yield Waiting(sequence.key, pending, pages, now - owner.arrived, sequence.unscored)

    def _follows(self, sequence: Sequence) -> bool:
        """Whether its prompt is being computed by the request's first choice, whose pages it will share."""
        leader = self._owner[sequence.key].sequences[0]
        return sequence is not leader and leader.generated == 0 and leader.finish_reason is None

    def _draft_slots(self, members: list[Sequence], sampling: list[Sequence], plan: StepPlan) -> list[Slots]:
        """How many tokens to draft for each after this step; fixed before anything is drafted."""
        caps = [self._owner[sequence.key].request.speculative_tokens for sequence in sampling]
        # Anchors and what is left of prompts come first in the next step too.
        left = sum(sequence.pending - plan.rows.get(sequence.key, 0) for sequence in self.running)
        room = max(0, self.limits.token_budget - len(sampling) - left)
        slots = self.speculation.slots(sampling, caps, room)
        by_key = {sequence.key: count for sequence, count in zip(sampling, slots, strict=True)}
        return [by_key.get(sequence.key, Slots()) for sequence in members]

    def _latch(self, sequence: Sequence, rows: int, verify: int, slots: Slots) -> BatchItem:
        return BatchItem(
            sequence=sequence.key,
            history=sequence.tokens,
            start=sequence.computed,
            count=rows + verify,
            pages=np.asarray(sequence.pages, dtype=np.int32),
            sample=rows == sequence.pending,
            state=sequence.state,
            budget=self.intake.budget(sequence),
            round=sequence.round,
            draft=sequence.draft if verify else None,
            verify=verify,
            draft_slots=slots.model,
            lookup_slots=slots.lookup,
            scored=sequence.scores(rows),
        )

    # ---- seats

    def _admit(self, sequence: Sequence) -> None:
        self.table.seat(sequence)
        sequence.status = Status.RUNNING
        self.seated += sequence.generated == 0
        self.waiting.remove(sequence)
        insert(self.running, sequence)
        owner = self._owner[sequence.key]
        if owner.admitted is None:
            owner.admitted = self.clock()
            owner.usage.cached_tokens = sequence.computed
            self.observer.prefix_cache(sequence.length, sequence.computed)

    def _preempt(self, sequence: Sequence) -> None:
        """Take a sequence's pages away; it will recompute what the prefix cache does not keep."""
        self.table.vacate(sequence)
        sequence.status = Status.WAITING
        self.running.remove(sequence)
        insert(self.waiting, sequence)
        self._owner[sequence.key].preemptions += 1
        self.observer.preempted()

    # ---- after the worker: commit

    def commit(self, batch: VerificationBatch, result: StepResult) -> list[Delta]:
        """Take over what the worker decided. Returns the new pieces of output, to be streamed later."""
        assert batch is self._in_flight
        assert self._latched is not None
        self._in_flight = None
        deltas: list[Delta] = []
        sequences = [self._sequence(item.sequence) for item in batch.items]
        begun = time.perf_counter()
        forecast = self.speculation.observe(batch, result, sequences)
        for sequence, item, verdict, draft in zip(
            sequences, batch.items, result.verdicts, result.drafts, strict=True
        ):
            if sequence.aborted:
                deltas.append(self._end(sequence, "abort"))
                continue
            sequence.computed += item.count - item.verify + verdict.accepted
            sequence.scored += len(verdict.scores)
            self._owner[sequence.key].prompt_logprobs += verdict.scores
            if item.sample or verdict.finish is not None:
                deltas.append(self._commit_tokens(sequence, item, verdict, draft))
            if sequence.status is Status.RUNNING:
                self.table.publish(sequence)
        emitted = sum(len(delta.token_ids) for _, delta in deltas)
        stats = step_stats(batch, result, self._latched, forecast, emitted, begun, time.perf_counter())
        self.speculation.spent(stats.step_time, result.worker_time)
        self.observer.step(stats)
        return deltas + self.drain_aborted()

    def fail(self, batch: VerificationBatch, message: str) -> list[Delta]:
        """The worker raised: every sequence of the batch ends with an error; the others go on."""
        assert batch is self._in_flight
        self._in_flight = None
        sequences = [self._sequence(item.sequence) for item in batch.items]
        return [self._end(sequence, "error", error=message) for sequence in sequences]

    def drain_aborted(self) -> list[Delta]:
        """Ends of choices that were aborted while they were not in a step."""
        ended, self._aborted = self._aborted, []
        return ended

    def _sequence(self, key: int) -> Sequence:
        return next(sequence for sequence in self._owner[key].sequences if sequence.key == key)

    def _commit_tokens(
        self, sequence: Sequence, item: BatchItem, verdict: Verdict, draft: DraftBlock | None
    ) -> Delta:
        """Append emitted tokens up to a stop string, and end the sequence if it is at its end."""
        owner = self._owner[sequence.key]
        sequence.round += 1
        sequence.draft = draft
        emission = emit(sequence, item.verify, verdict, self.intake.eos_ids, owner.prompt_logprobs)
        sequence.extend(emission.tokens)
        tokens = len(emission.tokens)
        owner.count(item.verify, emission.round.accepted, tokens)
        self._time_emission(owner, sequence, tokens)
        if emission.finish is not None:
            error = FAULTS.get(verdict.finish or "") if emission.finish == "error" else None
            return self._end(sequence, emission.finish, emission, error)
        return owner, emission.delta(sequence.choice)

    def _time_emission(self, owner: ActiveRequest, sequence: Sequence, count: int) -> None:
        if not count:
            return
        now = self.clock()
        if owner.first_token is None:
            owner.first_token = now
            self.observer.first_token(now - owner.arrived)
        elif sequence.last_emission is not None:
            self.observer.inter_token(now - sequence.last_emission, count)
        sequence.last_emission = owner.last_token = now

    def _end(
        self,
        sequence: Sequence,
        finish: FinishReason,
        emission: Emission | None = None,
        error: str | None = None,
    ) -> Delta:
        """Finish a choice, whatever state it is in, and its request with the last of them."""
        owner = self._owner.pop(sequence.key)
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            if finish == "error":  # nothing that may be broken is found again, nor what it hangs from
                self.pool.forget(sequence.pages)
            else:
                self.table.publish(sequence)
        else:
            self.waiting.remove(sequence)
        self.table.vacate(sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason = finish
        if owner.finished:
            del self.requests[owner.request.request_id]
            self.observer.finished(owner.stats(self.clock(), finish))
        if emission is None:
            return owner, OutputDelta(sequence.choice, "", (), (), finish, None, error)
        return owner, emission.delta(sequence.choice, error)
