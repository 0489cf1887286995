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

    `law` [V] is the draft's q, None if one-hot. Rejection sampling reads `accept_u` and `final_u`, coupled
    sampling `key` (see `engine.noise.host_row_keys`).
    """

    row: int
    params: SamplingParams
    draft: int | None = None
    law: torch.Tensor | None = None
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


def decide(logits: torch.Tensor, choices: Sequence[Choice]) -> list[Decision | None]:
    """Decide each choice over its row of logits [., V], adjusted already.

    None for a row that holds NaN or plus infinity, or nothing but minus infinity.
    """
    library = native.kernels_for(logits)
    if library is None:
        return _decide(logits, choices)
    laws = [None if c.law is None else c.law.float().contiguous() for c in choices]
    packed = (native.Choice * len(choices))()
    for target, choice, law in zip(packed, choices, laws, strict=True):
        params = choice.params
        target.row = choice.row
        target.draft = -1 if choice.draft is None else choice.draft
        target.law = None if law is None else law.data_ptr()
        target.kind = native.KINDS[choice.kind]
        if not params.greedy:
            target.accept_u, target.final_u = choice.accept_u, choice.final_u
            target.temperature, target.top_k = params.temperature, max(params.top_k, 0)
            target.top_p, target.min_p = params.top_p, params.min_p
            target.key0, target.key1 = choice.key
    native.decide(library, logits, packed)
    return [Decision(c.token, bool(c.accepted)) if c.token >= 0 else None for c in packed]


def _decide(logits: torch.Tensor, choices: Sequence[Choice]) -> list[Decision | None]:
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
        if x is not None:
            q_x = 1.0 if choice.law is None else float(choice.law[x])
            if choice.accept_u * q_x < float(p[i, x]):
                decisions[i] = Decision(x, True)
                continue
        last.append(i)
        rejected.append(None if x is None else Rejected(x, choice.law))
    if last:
        u = torch.tensor([choices[i].final_u for i in last], dtype=torch.float64)
        for i, token in zip(last, draw(p, u, last, rejected).tolist(), strict=True):
            decisions[i] = Decision(token, False)
    return [decision for decision in decisions if decision is not None]
