"""What a step costs: measured at start, kept true by live steps.

cost = verify(B) + seconds a token * context tokens + draft(N) + overhead, and some more where any drafts are
verified, for B rows of the target, prefill rows included, and N tokens drafted afterwards for all sequences
together; SPS = 1 / cost (paper section 3.2.2). Draft and verification are timed apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from scheduler.curve import MOST_RATIO, Curve
from scheduler.ranking import Floats

_FADE = 0.01  # of a step's weight, by which what drafts cost is forgotten where there are none
_RARE_WEIGH = 4.0  # as much as a plain one, a step that drafts, or that verifies drafts
_DOUBT = 0.98  # of what is known of plain steps after one that was none
_LEAST_DOUBT = 0.001  # seconds


@dataclass
class Throughput:
    """`verify` over rows, `draft` over drafted tokens; `per_context` seconds a token that attention reads.

    `context` are the tokens that attention read in the profile's steps. `overhead` seconds go into neither,
    in every step, and `for_drafts` more where any drafts are verified, however many. `per_token` go into
    deciding a token, which is what a step is for: it does not count where sizes of a step are compared.
    """

    verify: Curve
    draft: Curve
    per_context: float = 0.0
    context: float = 0.0
    overhead: float = 0.0
    for_drafts: float = 0.0
    per_token: float = 0.0
    weight: float = 0.05  # of a live step
    _sure: float = 0.0  # how well it is known what plain steps take, 0 to 1

    def seconds(self, rows: int, most_drafts: int, context_tokens: float, slots: int) -> Floats:
        """[most_drafts + 1]: a step of `rows` rows and 0, 1, ... drafts, which drafts `slots` tokens.

        `context_tokens` are those of all its sequences together.
        """
        return self._verify(rows, most_drafts, context_tokens) + self._draft(slots)

    def few_seconds(self, rows: int, most_drafts: int, context_tokens: float, slots: int) -> list[float]:
        """The same in plain numbers."""
        besides = self._draft(slots)
        return [seconds + besides for seconds in self._few(rows, most_drafts, context_tokens)]

    def step(self, rows: int, drafts: int, context_tokens: float, slots: int) -> float:
        """Seconds of one step: as many rows, drafts among them, and as many tokens drafted afterwards."""
        own = self.verify.one(rows) + self._context_seconds(context_tokens) + self.overhead
        return max(own, 1e-9) + (self.for_drafts if drafts else 0.0) + self._draft(slots)

    def planned(self, rows: int, most_drafts: int, context_tokens: float) -> Floats:
        """[most_drafts + 1]: a step that verifies 0, 1, ... drafts, and drafts as many."""
        seconds = self._verify(rows, most_drafts, context_tokens)
        seconds[1:] += self.draft.at(np.arange(1.0, most_drafts + 1.0))
        return seconds

    def few_planned(self, rows: int, most_drafts: int, context_tokens: float) -> list[float]:
        """The same in plain numbers."""
        drafts = [0.0, *self.draft.several(1, most_drafts)]
        verify = self._few(rows, most_drafts, context_tokens)
        return [one + other for one, other in zip(verify, drafts, strict=True)]

    def observe(self, rows: int, context_tokens: float, forward_seconds: float) -> None:
        """A live step's forward pass."""
        own = forward_seconds - self._context_seconds(context_tokens)
        # What a machine can do, it can for both.
        self.draft.scale(self.verify.refresh(rows, own, self.weight))

    def observe_draft(self, slots: int, seconds: float) -> None:
        """A live step's draft."""
        if slots:
            # Where drafts do not pay there are few; each must count, or a bad profile would last.
            self.draft.refresh(slots, seconds, self._rare)

    def observe_rest(self, drafts: int, emitted: int, accept_seconds: float, overhead: float) -> None:
        """What else a live step took, which verified so many drafts: deciding tokens, and the overhead.

        `emitted` is 0 for a step with prompts in it, whose rows take time that must not count as a token's.
        """
        if emitted:
            each = accept_seconds / emitted
            if not self.per_token:
                self.per_token = each
            elif not drafts:  # plain tokens tell; what took more than twice as long was held up
                self.per_token += self.weight * (min(each, MOST_RATIO * self.per_token) - self.per_token)
            if drafts:
                overhead += accept_seconds - emitted * self.per_token
        known = self.overhead + (self.for_drafts if drafts else 0.0)
        missed = min(max(overhead, 0.0) - known, max(known, _LEAST_DOUBT))
        if drafts:  # what is more in such a step is theirs, as far as it is known what others take
            shared = 0.5 * (1.0 - self._sure) * self.weight * missed
            theirs = self._sure * self._rare * min(missed, max(self.for_drafts, _LEAST_DOUBT))
            self.overhead = max(0.0, self.overhead + shared)
            self.for_drafts = max(0.0, self.for_drafts + shared + theirs)
            self._sure *= _DOUBT
        else:  # where drafts are not made for it, it is forgotten, or it could never be found wrong
            self.overhead = max(0.0, self.overhead + self.weight * missed)
            self.for_drafts *= 1.0 - self.weight * _FADE
            self._sure += self.weight * (1.0 - self._sure)

    @property
    def _rare(self) -> float:
        """Weight of a step with something in it that may be in few."""
        return min(_RARE_WEIGH * self.weight, 0.5)

    def _verify(self, rows: int, most_drafts: int, context_tokens: float) -> Floats:
        curve = self.verify.at(np.arange(rows, rows + most_drafts + 1, dtype=np.float64))
        seconds = np.maximum(curve + self._context_seconds(context_tokens) + self.overhead, 1e-9)
        seconds[1:] += self.for_drafts
        return seconds

    def _few(self, rows: int, most_drafts: int, context_tokens: float) -> list[float]:
        besides = self._context_seconds(context_tokens) + self.overhead
        plain, *others = [max(cost + besides, 1e-9) for cost in self.verify.several(rows, most_drafts + 1)]
        return [plain, *[cost + self.for_drafts for cost in others]]

    def _draft(self, slots: int) -> float:
        return self.draft.one(slots) if slots else 0.0

    def _context_seconds(self, context_tokens: float) -> float:
        """Beyond the profile's own context, which its points have in them already."""
        return self.per_context * (context_tokens - self.context)

    def to_dict(self) -> dict[str, Any]:
        return {
            "verify": self.verify.to_list(),
            "draft": self.draft.to_list(),
            "staircase": self.verify.staircase,
            "per_context": self.per_context,
            "context": self.context,
            "overhead": self.overhead,
            "for_drafts": self.for_drafts,
            "per_token": self.per_token,
        }

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Throughput:
        """Raises ValueError or KeyError for anything that `to_dict` did not write."""
        verify = Curve([(size, seconds) for size, seconds in raw["verify"]], bool(raw["staircase"]))
        draft = Curve([(size, seconds) for size, seconds in raw["draft"]])
        rest = ("per_context", "context", "overhead", "for_drafts", "per_token")
        return cls(verify, draft, *(float(raw[name]) for name in rest))

    def check(self, most_rows: int) -> None:
        """Raises ValueError if the profile does not reach the largest step there can be."""
        if self.verify.sizes[-1] < most_rows:
            raise ValueError(
                f"the profile ends at {self.verify.sizes[-1]:.0f} rows, steps may have {most_rows}"
            )
