"""What a step costs: measured at start, kept true by live steps.

cost = verify(B) + seconds a token * context tokens + draft(N) + overhead, and some more where any drafts are
verified, for B rows of the target, prefill rows included, and N tokens drafted afterwards for all sequences
together; SPS = 1 / cost (paper section 3.2.2). Draft and verification are timed apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from scheduler.ranking import Floats

_SPREAD = 0.4  # of what a live step tells about its size, that holds for all sizes
_RETURN = 0.1  # of a step's weight, by which what is known of other sizes goes back to the profile
_DRAFTS_WEIGH = 4.0  # as much as a verification in their own curve
_NOISE = 1.15  # a point this far above its neighbours' line may be noise
_LEAST_DOUBT = 0.001  # seconds
_MOST_RATIO = 2.0  # a step that took longer was held up by something else


class Curve:
    """Seconds over a size, through measured points; never falling.

    Between points the cost is interpolated, or that of the next point where execution pads (`staircase`);
    past the last it goes on as steeply as it came. Small dents in the slope are taken for noise: whoever
    looks for the best size would find them first. Live steps move it: by one factor for all sizes, since a
    slower or busier machine is so at every one, and by one for each point, which fades where no steps are.
    Raises ValueError for points that cannot be a cost.
    """

    def __init__(self, points: Sequence[tuple[float, float]], staircase: bool = False) -> None:
        if not points:
            raise ValueError("a cost curve needs a point")
        self.sizes = np.array([size for size, _ in points], dtype=np.float64)
        self._profile = np.array([seconds for _, seconds in points], dtype=np.float64)
        self.staircase = staircase
        if (np.diff(self.sizes) <= 0).any():
            raise ValueError("the sizes of a cost curve must rise")
        if not (np.isfinite(self._profile).all() and (self._profile >= 0).all()):
            raise ValueError("the costs of a curve must be finite and not negative")
        self._common, self._own = 1.0, np.ones(len(points))
        self.seconds = self._smooth()

    def _smooth(self) -> Floats:
        """Without noise: a larger size is never cheaper, and where nothing pads, costs rise ever faster.

        Noise only ever slows a step down, so a size costs at most what a larger one was seen to cost. A slope
        that falls by too much for noise stays.
        """
        rising: Floats = np.minimum.accumulate(self._seen()[::-1])[::-1]
        if self.staircase:
            return rising
        hull = np.interp(self.sizes, *_lower_hull(self.sizes.tolist(), rising.tolist()))
        return np.maximum(hull, rising / _NOISE)

    def _seen(self) -> Floats:
        """With what noise there is in it."""
        seen: Floats = self._profile * self._own * self._common
        return seen

    def at(self, sizes: Floats | Sequence[float]) -> Floats:
        """Seconds at each size."""
        return self._read(self.seconds, sizes)

    def one(self, size: float) -> float:
        """Seconds at a single size: every step asks for a few, and arrays of one are dear."""
        return self._one(self.seconds, size)

    def _one(self, known: Floats, size: float) -> float:
        last = float(self.sizes[-1])
        if size > last or self.staircase:
            return float(self._read(known, [size])[0])
        return float(np.interp(size, self.sizes, known))

    def _read(self, known: Floats, sizes: Floats | Sequence[float]) -> Floats:
        wanted = np.asarray(sizes, dtype=np.float64)
        if self.staircase:
            inside = known[np.minimum(np.searchsorted(self.sizes, wanted), len(known) - 1)]
        else:
            inside = np.interp(wanted, self.sizes, known)
        slope = 0.0
        if len(known) > 1:
            slope = (known[-1] - known[-2]) / (self.sizes[-1] - self.sizes[-2])
        out: Floats = inside + slope * np.maximum(wanted - self.sizes[-1], 0.0)
        return out

    def refresh(self, size: float, seconds: float, weight: float) -> float:
        """A live step of this size took so long: move the curve by `weight` of what it was off.

        Returns the factor by which all sizes were moved.
        """
        # Against what was seen, not what is made of it, or a size that does cost more than the next would
        # for ever seem to say that all have become slower.
        expected = self._one(self._seen(), size)
        if expected <= 0.0:
            return 1.0
        ratio = min(max(seconds / expected, 1.0 / _MOST_RATIO), _MOST_RATIO)
        step = 1.0 + weight * _SPREAD * (ratio - 1.0)
        self._common *= step
        rest = weight * (ratio / step - 1.0)
        self._own += weight * _RETURN * (1.0 - self._own)
        for point, share in self._around(size):
            self._own[point] *= 1.0 + share * rest
        self.seconds = self._smooth()
        return step

    def scale(self, factor: float) -> None:
        """Everything takes `factor` times as long."""
        self._common *= factor
        self.seconds = self.seconds * factor

    def _around(self, size: float) -> list[tuple[int, float]]:
        """The points that a size lies between, and how much of it is each."""
        right = min(int(np.searchsorted(self.sizes, size)), len(self.sizes) - 1)
        left = max(right - 1, 0)
        if self.staircase or left == right or size >= self.sizes[-1]:
            return [(right, 1.0)]
        share = float((size - self.sizes[left]) / (self.sizes[right] - self.sizes[left]))
        return [(right, share), (left, 1.0 - share)]

    def to_list(self) -> list[tuple[float, float]]:
        """What was measured, as live steps have moved it and noise included: from it comes the same curve."""
        return list(zip(self.sizes.tolist(), self._seen().tolist(), strict=True))


def _lower_hull(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[list[float], list[float]]:
    """Corners of the largest convex curve that is nowhere above these points.

    Of plain numbers: this runs with every step, and they are few.
    """
    x: list[float] = []
    y: list[float] = []
    for size, cost in zip(sizes, seconds, strict=True):
        while len(x) > 1 and (cost - y[-2]) * (x[-1] - x[-2]) < (y[-1] - y[-2]) * (size - x[-2]):
            x.pop()
            y.pop()
        x.append(size)
        y.append(cost)
    return x, y


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

    def seconds(self, rows: int, most_drafts: int, context_tokens: float, slots: int) -> Floats:
        """[most_drafts + 1]: a step of `rows` rows and 0, 1, ... drafts, which drafts `slots` tokens.

        `context_tokens` are those of all its sequences together.
        """
        return self._verify(rows, most_drafts, context_tokens) + self._draft(slots)

    def step(self, rows: int, drafts: int, context_tokens: float, slots: int) -> float:
        """Seconds of one step: as many rows, drafts among them, and as many tokens drafted afterwards."""
        own = self.verify.one(rows) + self._context_seconds(context_tokens) + self.overhead
        return max(own, 1e-9) + (self.for_drafts if drafts else 0.0) + self._draft(slots)

    def planned(self, rows: int, most_drafts: int, context_tokens: float) -> Floats:
        """[most_drafts + 1]: a step that verifies 0, 1, ... drafts, and drafts as many."""
        seconds = self._verify(rows, most_drafts, context_tokens)
        seconds[1:] += self.draft.at(np.arange(1.0, most_drafts + 1.0))
        return seconds

    def observe(self, rows: int, context_tokens: float, forward_seconds: float) -> None:
        """A live step's forward pass."""
        own = forward_seconds - self._context_seconds(context_tokens)
        # What a machine can do, it can for both.
        self.draft.scale(self.verify.refresh(rows, own, self.weight))

    def observe_draft(self, slots: int, seconds: float) -> None:
        """A live step's draft."""
        if slots:
            # Where drafts do not pay there are few; each must count, or a bad profile would last.
            self.draft.refresh(slots, seconds, min(_DRAFTS_WEIGH * self.weight, 0.5))

    def observe_rest(self, drafts: int, emitted: int, accept_seconds: float, overhead: float) -> None:
        """What else a live step took, which verified so many drafts: deciding tokens, and the overhead.

        `emitted` is 0 for a step with prompts in it, whose rows take time that must not count as a token's.
        """
        if emitted:
            each = accept_seconds / emitted
            if not self.per_token:
                self.per_token = each
            elif not drafts:  # plain tokens tell; what took more than twice as long was held up
                self.per_token += self.weight * (min(each, _MOST_RATIO * self.per_token) - self.per_token)
            if drafts:
                overhead += accept_seconds - emitted * self.per_token
        known = self.overhead + (self.for_drafts if drafts else 0.0)
        missed = min(max(overhead, 0.0) - known, max(known, _LEAST_DOUBT))
        share = self.weight / (2.0 if drafts else 1.0)
        self.overhead = max(0.0, self.overhead + share * missed)
        if drafts:
            self.for_drafts = max(0.0, self.for_drafts + share * missed)
        else:  # where drafts are not made for it, it is forgotten, or it could never be found wrong
            self.for_drafts *= 1.0 - self.weight * _RETURN

    def _verify(self, rows: int, most_drafts: int, context_tokens: float) -> Floats:
        curve = self.verify.at(np.arange(rows, rows + most_drafts + 1, dtype=np.float64))
        seconds = np.maximum(curve + self._context_seconds(context_tokens) + self.overhead, 1e-9)
        seconds[1:] += self.for_drafts
        return seconds

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
