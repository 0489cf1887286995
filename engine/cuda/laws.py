"""The laws that drafts were drawn from, of all blocks that are verified by rejection at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine.batch import DraftBlock


@dataclass(slots=True)
class LawGroup:
    """Blocks over one draft vocabulary. `d2t` [V'] are its target ids, None: the target's own vocabulary.

    Places among what is rejection-sampled: `at`, of each verified draft's row; `runs`, of each block's run.
    `begins`: a block's first draft among those of the group; `lasts`: its last.
    """

    d2t: torch.Tensor | None
    at: list[int] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)
    lasts: list[int] = field(default_factory=list)
    laws: list[torch.Tensor] = field(default_factory=list)

    def add(self, run: int, row: int, law: torch.Tensor) -> None:
        """A block's law [verified drafts, V'], whose first row is number `row`."""
        begin, count = len(self.at), len(law)
        self.at += range(row, row + count)
        self.runs.append(run)
        self.begins.append(begin)
        self.lasts.append(begin + count - 1)
        self.laws.append(law)

    def joined(self, device: torch.device) -> torch.Tensor:
        """[verified drafts, V']: wherever the blocks were kept, in one copy of each."""
        return torch.cat([law.to(device) for law in self.laws])

    def chances(self, laws: torch.Tensor, tokens: torch.Tensor, vocab: int) -> torch.Tensor:
        """q of the drafts: laws [m, V'] at tokens [m] -> [m]. 0 for what the draft's vocabulary lacks."""
        if self.d2t is None:
            return laws.gather(1, tokens[:, None])[:, 0]
        d2t = self.d2t.to(laws.device)
        own = torch.full((vocab,), -1, dtype=torch.int64, device=laws.device)
        own[d2t] = torch.arange(len(d2t), device=laws.device)
        places = own[tokens]
        return torch.where(places < 0, 0.0, laws.gather(1, places.clamp_min(0)[:, None])[:, 0])

    def whole(self, laws: torch.Tensor, vocab: int) -> torch.Tensor:
        """[m, V'] over the target's vocabulary [m, V]."""
        if self.d2t is None:
            return laws
        full = laws.new_zeros(len(laws), vocab)
        return full.index_copy_(1, self.d2t.to(laws.device), laws)


def law_groups(blocks: Sequence[tuple[int, int, DraftBlock, int]]) -> list[LawGroup]:
    """Of (run, its first row, block, how many of its drafts are verified), where these have laws."""
    groups: dict[int, LawGroup] = {}
    for run, row, block, verify in blocks:
        if block.q is not None and verify:
            group = groups.setdefault(id(block.d2t), LawGroup(block.d2t))
            group.add(run, row, block.q[:verify])
    return list(groups.values())
