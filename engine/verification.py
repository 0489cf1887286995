"""Accept and correct: turn the target's logits over drafted rows into emitted tokens, without bias.

Rows of a block are looked at one after another, all sequences together: row i is processed only where
drafts 1..i were accepted, so processing costs what is emitted, and everything that depends on position
(penalties, minimum length, grammar, random streams) is exact by construction.

What a row decides is in engine/decision.py. A run goes on while the decision is the draft; it ends with the
first that is not, or with the bonus token after a fully accepted block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.batch import BatchItem, Finish, Verdict
from engine.decision import Choice, decide
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
    logp: torch.Tensor | None = None  # [V] log probabilities of the present row, if they are reported
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
    accept = host_uniforms(streams, anchors, rounds, slots, Purpose.ACCEPT)
    final = host_uniforms(streams, anchors, rounds, slots, Purpose.FINAL)
    for i, run in enumerate(sampled):
        run.accept_u, run.final_u = accept[i], final[i]


def _advance(live: list[Run], logits: torch.Tensor) -> None:
    """Process the next row of every live run."""
    choices = [_choice(run, logits) for run in live]
    seeded = [i for i, choice in enumerate(choices) if choice.kind == "coupled"]
    if seeded:
        keys = host_row_keys(
            [live[i].item.state.params.seed or 0 for i in seeded],
            [live[i].item.state.choice for i in seeded],
            [live[i].item.anchor + 1 + len(live[i].tokens) for i in seeded],
        )
        for i, key in zip(seeded, keys, strict=True):
            choices[i].key = key
    for run, decision in zip(live, decide(logits, choices), strict=True):
        if decision is None:  # fail this sequence, and only this one
            top = float(logits[run.row + len(run.tokens)].amax())
            run.close(undecided(run, top == -torch.inf))
        else:
            logprob = None
            if run.logp is not None:
                logprob = _report(run.logp, decision.token, run.item.state.params.logprobs or 0)
            run.emit(decision.token, decision.accepted, logprob)


def undecided(run: Run, empty: bool) -> Finish:
    """Why a row is no distribution: the request leaves it `empty`, or it is the model's fault."""
    return "forbidden" if empty and run.item.state.adjusts else "error"


def _choice(run: Run, logits: torch.Tensor) -> Choice:
    """What the run's next row is to decide. Adjusts the row in place: it is looked at only now."""
    state, done = run.item.state, len(run.tokens)
    choice = Choice(run.row + done, state.params)
    if state.params.logprobs is not None or state.adjusts:
        row = logits[choice.row]
        if state.params.logprobs is not None:
            run.logp = torch.log_softmax(row, -1)  # of the model itself, before anything changes the row
        if state.adjusts:
            state.adjust(row)
    draft = run.item.draft
    if draft is not None and done < run.item.verify:
        choice.draft = draft.tokens[done]
        choice.law = None if run.accept_u is None else _draft_law(run, logits.shape[-1])
    if run.accept_u is not None and run.final_u is not None:
        choice.accept_u, choice.final_u = run.accept_u[done], run.final_u[done]
    return choice


def _draft_law(run: Run, vocab: int) -> torch.Tensor | None:
    """q of the run's next draft over the target's vocabulary [V]; None if one-hot."""
    draft = run.item.draft
    if draft is None or draft.q is None:
        return None
    row = draft.q[len(run.tokens)]
    if draft.d2t is None:
        return row
    full = torch.zeros(vocab, dtype=row.dtype)
    full[draft.d2t] = row
    return full


def _report(logp: torch.Tensor, token: int, top: int) -> TokenLogprob:
    """The token's log probability and its `top` likeliest alternatives. logp [V]."""
    if not top:
        return TokenLogprob(token, float(logp[token]))
    values, ids = torch.topk(logp, top)
    return TokenLogprob(token, float(logp[token]), tuple(zip(ids.tolist(), values.tolist(), strict=True)))
