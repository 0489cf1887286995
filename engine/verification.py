"""Accept and correct: turn the target's logits over drafted rows into emitted tokens, without bias.

Rows of a block are looked at one after another: row i is processed only where drafts 1..i were accepted, so
processing costs what is emitted, and everything that depends on position (penalties, minimum length, grammar,
random streams) is exact by construction. Where nothing depends on the tokens before, a block is decided in
one go; else row by row, all sequences together.

What a row decides is in engine/decision.py. A run goes on while the decision is the draft; it ends with the
first that is not, or with the bonus token after a fully accepted block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.batch import BatchItem, Finish, Verdict
from engine.decision import Choice, Decision, decide
from engine.logprobs import logprobs
from engine.noise import Purpose, host_row_keys, host_uniforms
from engine.outputs import TokenLogprob
from engine.scoring import score


@dataclass(slots=True)
class Run:
    """One item on its way through its rows."""

    item: BatchItem
    row: int  # of the anchor, in the logits
    accept_u: list[float] | None = None  # [1 + verify], of a run that rejection sampling decides
    final_u: list[float] | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    said: torch.Tensor | None = None  # [V] the model's logits of the present row, if they are reported
    accepted: int = 0
    verdict: Verdict | None = None
    scores: tuple[TokenLogprob, ...] = ()

    def emit(self, token: int, accepted: bool, logprob: TokenLogprob | None = None) -> None:
        """Take one token; close the run if it is a stop token, the last allowed, or a correction."""
        item = self.item
        self.tokens.append(token)
        self.accepted += accepted
        item.state.advance(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if token in item.state.stop_ids:
            self.close("stop", token)
        elif item.state.ended:
            self.close("stop")
        elif len(self.tokens) >= item.budget:
            self.close("length")
        elif not accepted:
            self.close()

    def close(self, finish: Finish | None = None, stop_token: int | None = None) -> None:
        self.verdict = Verdict(
            tuple(self.tokens), self.accepted, tuple(self.logprobs), finish, stop_token, self.scores
        )


def verify(items: Sequence[BatchItem], logits: torch.Tensor) -> list[Verdict]:
    """Decide every item. logits [n, V]: `logit_rows` of each item, in order.

    Advances each item's SamplingState by the tokens emitted. Items without `sample` or a budget emit nothing.
    """
    runs = open_runs(items, logits)
    draw_uniforms(runs)
    while live := [run for run in runs if run.verdict is None]:
        _advance(live, logits)
    return [run.verdict for run in runs if run.verdict is not None]


def open_runs(items: Sequence[BatchItem], logits: torch.Tensor) -> list[Run]:
    """A run for each item, at its anchor's row; closed if nothing is to be emitted. Scores scored rows."""
    runs: list[Run] = []
    row = 0
    for item in items:
        run = Run(item, row + item.scored)
        runs.append(run)
        if item.scored:  # slicing alone takes a good part of a millisecond here, the caches being cold
            scores = score(item, logits[row : row + item.scored])
            if scores is None:
                run.close("error")
            else:
                run.scores = scores
        row += item.logit_rows
        if run.verdict is not None:
            continue
        if not item.sample:
            run.close()
        elif not item.budget:
            run.close("length")
    return runs


def draw_uniforms(runs: list[Run]) -> None:
    """Give every rejection-sampled run its uniforms for this round, in one call a purpose."""
    sampled = [
        run
        for run in runs
        if run.verdict is None and not run.item.state.params.greedy and run.item.state.params.seed is None
    ]
    if not sampled:
        return
    streams = [run.item.state.stream for run in sampled]
    anchors = [run.item.anchor for run in sampled]
    rounds = [run.item.round for run in sampled]
    slots = 1 + max(run.item.verify for run in sampled)
    final = host_uniforms(streams, anchors, rounds, slots, Purpose.FINAL)
    accept = final  # not looked at where nothing was drafted
    if slots > 1:
        accept = host_uniforms(streams, anchors, rounds, slots, Purpose.ACCEPT)
    for i, run in enumerate(sampled):
        run.accept_u, run.final_u = accept[i], final[i]


def _advance(live: list[Run], logits: torch.Tensor) -> None:
    """Process the next rows of every live run: all that are left, or one where what is emitted matters."""
    runs = [_choices(run, logits) for run in live]
    _draw_keys(live, runs)
    decided = decide(logits, runs)
    reports = _reports(live, decided)
    for run, decisions, report in zip(live, decided, reports, strict=True):
        for decision in decisions:
            if decision is None:  # fail this sequence, and only this one
                top = float(logits[run.row + len(run.tokens)].amax())
                run.close(undecided(run, top == -torch.inf))
            else:
                run.emit(decision.token, decision.accepted, report)
            if run.verdict is not None:
                break


def _draw_keys(live: list[Run], runs: list[list[Choice]]) -> None:
    """Give seeded rows the noise of their position."""
    seeded = [
        (run, choice, run.item.anchor + 1 + choice.row - run.row)
        for run, choices in zip(live, runs, strict=True)
        for choice in choices
        if choice.kind == "coupled"
    ]
    if not seeded:
        return
    keys = host_row_keys(
        [run.item.state.params.seed or 0 for run, _, _ in seeded],
        [run.item.state.choice for run, _, _ in seeded],
        [position for _, _, position in seeded],
    )
    for (_, choice, _), key in zip(seeded, keys, strict=True):
        choice.key = key


def undecided(run: Run, empty: bool) -> Finish:
    """Why a row is no distribution: the request leaves it `empty`, or it is the model's fault."""
    return "forbidden" if empty and run.item.state.adjusts else "error"


def _choices(run: Run, logits: torch.Tensor) -> list[Choice]:
    """What the run's next rows are to decide. Adjusts a row in place: it is looked at only now."""
    state, done = run.item.state, len(run.tokens)
    if state.params.logprobs is None and not state.adjusts:
        return [_choice(run, at) for at in range(done, run.item.verify + 1)]
    row = logits[run.row + done]
    if state.params.logprobs is not None:  # of the model itself: what changes the row comes later
        run.said = row.clone() if state.adjusts else row
    if state.adjusts:
        state.adjust(row)
    return [_choice(run, done)]


def _choice(run: Run, at: int) -> Choice:
    """Of the row behind so many of the run's drafts."""
    choice, draft = Choice(run.row + at, run.item.state.params), run.item.draft
    if draft is not None and at < run.item.verify:
        choice.draft = draft.tokens[at]
        if run.accept_u is not None and draft.q is not None:
            choice.law, choice.d2t = draft.q[at], draft.d2t
    if run.accept_u is not None and run.final_u is not None:
        choice.accept_u, choice.final_u = run.accept_u[at], run.final_u[at]
    return choice


def _reports(live: list[Run], decided: list[list[Decision | None]]) -> list[TokenLogprob | None]:
    """Log probabilities of the decided tokens and their alternatives, where a request wants them."""
    reports: list[TokenLogprob | None] = [None] * len(live)
    rows, tokens, tops, wanted = [], [], [], []
    for i, (run, (decision, *_)) in enumerate(zip(live, decided, strict=True)):
        if run.said is not None and decision is not None:  # then it is the only one
            wanted.append(i)
            rows.append(run.said)
            tokens.append(decision.token)
            tops.append(run.item.state.params.logprobs or 0)
    for i, report in zip(wanted, logprobs(rows, tokens, tops), strict=True):
        reports[i] = report
    return reports
