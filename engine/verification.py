"""Accept and correct: turn the target's logits over drafted rows into emitted tokens, without bias.

Rows of a block are looked at one after another, all sequences together: row i is processed only where
drafts 1..i were accepted, so processing costs what is emitted, and everything that depends on position
(penalties, minimum length, random streams) is exact by construction.

* greedy: emit the argmax; go on while it equals the draft.
* coupled (seeded): emit argmax(log p + G); go on while it equals the draft.
* rejection: accept draft x iff u * q(x) < p(x); at the first rejection draw from max(p - q, 0); after a
  fully accepted block draw the bonus from p (Leviathan et al. 2023; Chen et al. 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.batch import BatchItem, Finish, Verdict
from engine.draws import Rejected, coupled_argmax, draw
from engine.noise import Purpose, row_keys, uniforms
from engine.outputs import TokenLogprob
from engine.sampling import peaks, probabilities


@dataclass(slots=True)
class _Run:
    """One item on its way through its rows."""

    item: BatchItem
    row: int  # of the anchor, in the logits
    accept_u: list[float] = field(default_factory=list)  # [verify + 1]
    final_u: list[float] = field(default_factory=list)  # [verify + 1]
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    logp: torch.Tensor | None = None  # [V] log probabilities of the present row, if they are reported
    accepted: int = 0
    verdict: Verdict | None = None

    @property
    def proposed(self) -> int | None:
        """The draft that the next row must agree with; None at the bonus row."""
        draft, done = self.item.draft, len(self.tokens)
        return draft.tokens[done] if draft is not None and done < self.item.verify else None

    def emit(self, token: int, accepted: bool) -> None:
        """Take one token; close the run if it is a stop token, the last allowed, or a correction."""
        item = self.item
        self.tokens.append(token)
        self.accepted += accepted
        item.state.advance(token)
        if self.logp is not None:
            self.logprobs.append(_report(self.logp, token, item.state.params.logprobs or 0))
        if token in item.state.stop_ids:
            self.close("stop", token)
        elif len(self.tokens) >= item.budget:
            self.close("length")
        elif not accepted:
            self.close()

    def close(self, finish: Finish | None = None, stop_token: int | None = None) -> None:
        self.verdict = Verdict(tuple(self.tokens), self.accepted, tuple(self.logprobs), finish, stop_token)


def verify(items: Sequence[BatchItem], logits: torch.Tensor) -> list[Verdict]:
    """Decide every item. logits [n, V]: 1 + verify rows an item, for the items with `sample` set, in order.

    Advances each item's SamplingState by the tokens emitted. Items without `sample` get an empty verdict.
    """
    runs: list[_Run] = []
    row = 0
    for item in items:
        runs.append(_Run(item, row))
        if item.sample:
            row += 1 + item.verify
        else:
            runs[-1].close()
    _draw_uniforms(runs)
    while live := [run for run in runs if run.verdict is None]:
        _advance(live, logits)
    return [run.verdict for run in runs if run.verdict is not None]


def _draw_uniforms(runs: list[_Run]) -> None:
    """Give every rejection-sampled run its uniforms for this round, in one call a purpose."""
    sampled = [
        run
        for run in runs
        if run.verdict is None and not run.item.state.params.greedy and run.item.state.params.seed is None
    ]
    if not sampled:
        return
    streams = torch.tensor([run.item.state.stream for run in sampled], dtype=torch.int64)
    anchors = torch.tensor([run.item.anchor for run in sampled], dtype=torch.int64)
    rounds = torch.tensor([run.item.round for run in sampled], dtype=torch.int64)
    slots = 1 + max(run.item.verify for run in sampled)
    accept = uniforms(streams, anchors, rounds, slots, Purpose.ACCEPT).tolist()
    final = uniforms(streams, anchors, rounds, slots, Purpose.FINAL).tolist()
    for i, run in enumerate(sampled):
        run.accept_u, run.final_u = accept[i], final[i]


def _advance(live: list[_Run], logits: torch.Tensor) -> None:
    """Process the next row of every live run."""
    rows = [run.row + len(run.tokens) for run in live]
    tops, finite = peaks(logits, rows)
    for i, run in enumerate(live):
        if not finite[i]:  # NaN or infinity came out of the model: fail this sequence, and only this one
            run.close("error")
        elif run.item.state.params.logprobs is not None:
            run.logp = torch.log_softmax(
                logits[rows[i]], -1
            )  # of the model itself, before anything changes it
    adjusting = [i for i, run in enumerate(live) if run.verdict is None and run.item.state.adjusts]
    if adjusting:
        for i in adjusting:
            live[i].item.state.adjust(logits[rows[i]])  # in place: this row is looked at only now
        for i, top, ok in zip(adjusting, *peaks(logits, [rows[i] for i in adjusting]), strict=True):
            tops[i] = top
            if not ok:  # nothing is left that may be emitted
                live[i].close("error")

    greedy: list[int] = []
    seeded: list[int] = []
    free: list[int] = []
    for i, run in enumerate(live):
        params = run.item.state.params
        if run.verdict is None:
            (greedy if params.greedy else free if params.seed is None else seeded).append(i)
    if greedy:
        _settle([live[i] for i in greedy], [tops[i] for i in greedy])
    if seeded:
        _coupled([live[i] for i in seeded], logits, [rows[i] for i in seeded])
    if free:
        _rejection([live[i] for i in free], logits, [rows[i] for i in free])


def _settle(runs: list[_Run], targets: list[int]) -> None:
    """The target's token is emitted whatever was drafted; the run goes on where they agree."""
    for run, token in zip(runs, targets, strict=True):
        run.emit(token, accepted=token == run.proposed)


def _coupled(runs: list[_Run], logits: torch.Tensor, rows: list[int]) -> None:
    p = probabilities(logits, [run.item.state.params for run in runs], rows)
    keys = row_keys(
        torch.tensor([run.item.state.params.seed for run in runs], dtype=torch.int64),
        torch.tensor([run.item.state.choice for run in runs], dtype=torch.int64),
        torch.tensor([run.item.anchor + 1 + len(run.tokens) for run in runs], dtype=torch.int64),
    )
    _settle(runs, coupled_argmax(p, keys).tolist())


def _rejection(runs: list[_Run], logits: torch.Tensor, rows: list[int]) -> None:
    p = probabilities(logits, [run.item.state.params for run in runs], rows)
    drafts = torch.tensor([[run.proposed or 0] for run in runs])
    chances = p.gather(1, drafts)[:, 0].tolist()
    last: list[int] = []  # runs that draw their last token here
    rejected: list[Rejected | None] = []
    for i, run in enumerate(runs):
        x = run.proposed
        if x is None:
            last.append(i)
            rejected.append(None)
            continue
        q = _draft_law(run, p.shape[-1])
        q_x = 1.0 if q is None else float(q[x])
        if run.accept_u[len(run.tokens)] * q_x < chances[i]:
            run.emit(x, accepted=True)
        else:
            last.append(i)
            rejected.append(Rejected(x, q))
    if last:
        u = torch.tensor([runs[i].final_u[len(runs[i].tokens)] for i in last], dtype=torch.float64)
        for i, token in zip(last, draw(p, u, last, rejected).tolist(), strict=True):
            runs[i].emit(token, accepted=False)


def _draft_law(run: _Run, vocab: int) -> torch.Tensor | None:
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
