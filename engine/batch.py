"""The frozen types that cross between the loop and the worker. Nothing in a latched batch changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from engine.outputs import TokenLogprob
from engine.sampling import SamplingState

Tokens = npt.NDArray[np.int32]

#: how verification may end a sequence
Finish = Literal["stop", "length", "error", "forbidden"]


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """Tokens a drafter proposes to follow a sequence's anchor.

    `q` [k, V'] holds, row by row, exactly the distribution each token was drawn from, in fp32; None means
    the proposals are deterministic, i.e. q is one-hot. `d2t` [V'] maps a reduced draft vocabulary to target
    ids (None: the same vocabulary). `confidence` [k] are raw logits of the conditional acceptance chance,
    None when the drafter has no such head. `q` and `confidence` never depend on tokens at or after their row.
    `chances` [k] of a block that was looked up are the drafter's own count of how often such are accepted.
    """

    tokens: tuple[int, ...]
    q: torch.Tensor | None = None
    d2t: torch.Tensor | None = None
    confidence: tuple[float, ...] | None = None
    chances: tuple[float, ...] | None = None

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class BatchItem:
    """One sequence's share of a step: `count` rows from position `start` on.

    `history` [>= start + count - drafted] are its tokens up to and including the anchor, a view that nobody
    writes to. Rows are history[start:], then the first `verify` tokens of `draft`. `sample` is False for a
    prefill chunk that is not the prompt's last, which needs no logits. `budget` is how many tokens may still
    be emitted; `round` never repeats within a sequence. `draft_slots`: how many tokens a model may draft
    afterwards; `lookup_slots`: how many may be looked up instead. `scored` rows, the last ones before the
    anchor (or of a chunk without `sample`), have their successor in the prompt reported, which takes their
    logits as well; nothing is verified beside them.
    """

    sequence: int
    history: Tokens
    start: int
    count: int
    pages: Tokens
    sample: bool
    state: SamplingState
    budget: int
    round: int
    draft: DraftBlock | None = None
    verify: int = 0
    draft_slots: int = 0
    lookup_slots: int = 0
    scored: int = 0

    @property
    def anchor(self) -> int:
        """Absolute position of the last token before the drafts."""
        return self.start + self.count - self.verify - 1

    @property
    def logit_rows(self) -> int:
        """How many of its rows, the last ones, need logits."""
        return self.scored + (1 + self.verify if self.sample else 0)


@dataclass(frozen=True, slots=True)
class VerificationBatch:
    """A latched step."""

    items: tuple[BatchItem, ...]

    @property
    def rows(self) -> int:
        return sum(item.count for item in self.items)

    def tokens(self) -> Tokens:
        """[T] all rows' tokens, item after item."""
        parts: list[Tokens] = []
        for item in self.items:
            known = item.count - item.verify
            parts.append(item.history[item.start : item.start + known])
            if item.verify and item.draft is not None:
                parts.append(np.asarray(item.draft.tokens[: item.verify], dtype=np.int32))
        return np.concatenate(parts)

    def positions(self) -> npt.NDArray[np.int64]:
        """[T] absolute positions."""
        return np.concatenate(
            [np.arange(item.start, item.start + item.count, dtype=np.int64) for item in self.items]
        )

    def logit_rows(self) -> npt.NDArray[np.int64]:
        """Indices of the rows whose logits are needed: those that are scored, and of sampled items the
        anchor's and every draft's."""
        wanted, row = [], 0
        for item in self.items:
            row += item.count
            if item.logit_rows:
                wanted.append(np.arange(row - item.logit_rows, row, dtype=np.int64))
        return np.concatenate(wanted) if wanted else np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """logits [n, V] of `logit_rows`, fp32 or wider; features [T, m*d] of all rows, None if not captured."""

    logits: torch.Tensor
    features: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification decided for one item.

    `tokens` are emitted in order; the first `accepted` of them were drafts. `finish` ends the sequence:
    "stop" at a stop token, "length" at the budget, "error" for logits that are not finite, "forbidden" where
    the request allows no token. `scores` has an entry for each row that was scored.
    """

    tokens: tuple[int, ...] = ()
    accepted: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: Finish | None = None
    stop_token: int | None = None
    scores: tuple[TokenLogprob, ...] = ()

    def decided(self, verified: int) -> int:
        """Of so many verified drafts those that were decided on.

        None was behind the first that was not accepted, nor behind one that ended the text.
        """
        return min(self.accepted + (len(self.tokens) > self.accepted), verified)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the worker hands back: verdicts and next drafts, parallel to the batch's items; seconds spent.

    `begun` is when it began, on `time.perf_counter`'s clock. `verify_time` went into deciding rows.
    """

    verdicts: tuple[Verdict, ...]
    drafts: tuple[DraftBlock | None, ...]
    begun: float
    forward_time: float
    verify_time: float
    draft_time: float

    @property
    def worker_time(self) -> float:
        return self.forward_time + self.verify_time + self.draft_time
