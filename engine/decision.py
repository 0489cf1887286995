"""What one row of logits decides: which token is emitted there, and whether it is the drafted one.

* greedy: the argmax.
* coupled (seeded): argmax(log p + G).
* rejection: the draft x if u * q(x) < p(x); else a draw from max(p - q, 0). Without a draft, a draw from p
  (Leviathan et al. 2023; Chen et al. 2023).

p is the row's own processed distribution. The kernels decide rows of fp32 on the CPU, each in one go; torch
everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.draws import Rejected, coupled_argmax, draw
from engine.native import rows as native
from engine.params import SamplingParams
from engine.sampling import probabilities


@dataclass(slots=True)
class Choice:
    """A row to be decided on, with the random numbers that it needs.

    `law` [V'] is the draft's q, None if one-hot; `d2t` [V'] are the target ids of a reduced vocabulary.
    Rejection sampling reads `accept_u` and `final_u`, coupled sampling `key` (see `engine.noise`).
    """

    row: int
    params: SamplingParams
    draft: int | None = None
    law: torch.Tensor | None = None
    d2t: torch.Tensor | None = None
    accept_u: float = 0.0
    final_u: float = 0.0
    key: tuple[int, int] = (0, 0)

    @property
    def kind(self) -> str:
        if self.params.greedy:
            return "greedy"
        return "rejection" if self.params.seed is None else "coupled"


class Decision(NamedTuple):
    token: int
    accepted: bool


def decide(logits: torch.Tensor, runs: Sequence[Sequence[Choice]]) -> list[list[Decision | None]]:
    """Decide each run of rows of logits [., V], adjusted already, up to the first that is not its draft.

    None for a row that holds NaN or plus infinity, or nothing but minus infinity: a run ends there too.
    """
    library = native.kernels_for(logits)
    if library is None:
        return _decide(logits, runs)
    choices = [choice for run in runs for choice in run]
    laws = [None if c.law is None else c.law.float().contiguous() for c in choices]
    packed = (native.Choice * len(choices))()
    for target, choice, law in zip(packed, choices, laws, strict=True):
        params = choice.params
        target.row = choice.row
        target.draft = -1 if choice.draft is None else choice.draft
        if law is not None:
            target.law, target.law_size = law.data_ptr(), len(law)
            target.ids = None if choice.d2t is None else choice.d2t.data_ptr()
        target.kind = native.KINDS[choice.kind]
        if not params.greedy:
            target.accept_u, target.final_u = choice.accept_u, choice.final_u
            target.temperature, target.top_k = params.temperature, max(params.top_k, 0)
            target.top_p, target.min_p = params.top_p, params.min_p
            target.key0, target.key1 = choice.key
    native.decide(library, logits, packed, [len(run) for run in runs])
    out, first = [], 0
    for run in runs:
        decided: list[Decision | None] = []
        for c in packed[first : first + len(run)]:
            decided.append(Decision(c.token, bool(c.accepted)) if c.token >= 0 else None)
            if not c.accepted:
                break
        out.append(decided)
        first += len(run)
    return out


def _decide(logits: torch.Tensor, runs: Sequence[Sequence[Choice]]) -> list[list[Decision | None]]:
    out: list[list[Decision | None]] = [[] for _ in runs]
    live = [i for i, run in enumerate(runs) if run]
    while live:
        rows = [runs[i][len(out[i])] for i in live]
        for i, decision in zip(live, _decide_rows(logits, rows), strict=True):
            out[i].append(decision)
        live = [i for i in live if len(out[i]) < len(runs[i]) and (out[i][-1] or _END).accepted]
    return out


_END = Decision(-1, False)


def _decide_rows(logits: torch.Tensor, choices: Sequence[Choice]) -> list[Decision | None]:
    """Each on its own."""
    rows = logits[torch.tensor([choice.row for choice in choices])]
    usable = rows.amax(-1).isfinite().tolist()
    decisions: list[Decision | None] = [None] * len(choices)
    for kind, decide_kind in (("greedy", _greedy), ("coupled", _coupled), ("rejection", _rejection)):
        of_kind = [i for i, choice in enumerate(choices) if usable[i] and choice.kind == kind]
        if of_kind:
            chosen = [choices[i] for i in of_kind]
            for i, decision in zip(of_kind, decide_kind(logits, chosen), strict=True):
                decisions[i] = decision
    return decisions


def _greedy(logits: torch.Tensor, choices: Sequence[Choice]) -> list[Decision]:
    tops = logits[torch.tensor([choice.row for choice in choices])].argmax(-1).tolist()
    return [Decision(top, top == choice.draft) for top, choice in zip(tops, choices, strict=True)]


def _law(logits: torch.Tensor, choices: Sequence[Choice]) -> torch.Tensor:
    return probabilities(logits, [choice.params for choice in choices], [choice.row for choice in choices])


def _coupled(logits: torch.Tensor, choices: Sequence[Choice]) -> list[Decision]:
    words = torch.tensor([choice.key for choice in choices], dtype=torch.int64)
    keys = (words - ((words >> 31) << 32)).to(torch.int32)
    tokens = coupled_argmax(_law(logits, choices), keys).tolist()
    return [Decision(token, token == choice.draft) for token, choice in zip(tokens, choices, strict=True)]


def _rejection(logits: torch.Tensor, choices: Sequence[Choice]) -> list[Decision]:
    p = _law(logits, choices)
    decisions: list[Decision | None] = [None] * len(choices)
    last: list[int] = []
    rejected: list[Rejected | None] = []
    for i, choice in enumerate(choices):
        x = choice.draft
        law = None if choice.law is None else _whole(choice, p.shape[1])
        if x is not None:
            q_x = 1.0 if law is None else float(law[x])
            if choice.accept_u * q_x < float(p[i, x]):
                decisions[i] = Decision(x, True)
                continue
        last.append(i)
        rejected.append(None if x is None else Rejected(x, law))
    if last:
        u = torch.tensor([choices[i].final_u for i in last], dtype=torch.float64)
        for i, token in zip(last, draw(p, u, last, rejected).tolist(), strict=True):
            decisions[i] = Decision(token, False)
    return [decision for decision in decisions if decision is not None]


def _whole(choice: Choice, vocab: int) -> torch.Tensor:
    """The draft's law over the target's vocabulary [V]."""
    assert choice.law is not None
    if choice.d2t is None:
        return choice.law
    return choice.law.new_zeros(vocab).index_copy_(0, choice.d2t, choice.law)
