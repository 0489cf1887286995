"""Seconds over the size of something: measured at points, moved by live steps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import isfinite

import numpy as np

from scheduler.ranking import Floats

_SPREAD = 0.4  # of what a live step tells about its size, that holds for all sizes
_RETURN = 0.1  # of a step's weight, by which what is known of other sizes goes back to the profile
_NOISE = 1.15  # a point this far above its neighbours' line may be noise
MOST_RATIO = 2.0  # a step that took longer was held up by something else


class Curve:
    """Seconds over a size, through measured points; never falling.

    Between points the cost is interpolated, or that of the next point where execution pads (`staircase`);
    past the last it goes on as steeply as it came. Small dents in the slope are taken for noise: whoever
    looks for the best size would find them first. Live steps move it: by one factor for all sizes, since a
    slower or busier machine is so at every one, and by one for each point, which fades where no steps are.
    Plain numbers: the points are few, and all of this runs with every step.
    Raises ValueError for points that cannot be a cost.
    """

    def __init__(self, points: Sequence[tuple[float, float]], staircase: bool = False) -> None:
        if not points:
            raise ValueError("a cost curve needs a point")
        self.sizes = [float(size) for size, _ in points]
        self._profile = [float(seconds) for _, seconds in points]
        self.staircase = staircase
        if any(after <= before for before, after in pairwise(self.sizes)):
            raise ValueError("the sizes of a cost curve must rise")
        if not all(isfinite(seconds) and seconds >= 0.0 for seconds in self._profile):
            raise ValueError("the costs of a curve must be finite and not negative")
        self._common, self._own = 1.0, [1.0] * len(points)
        self.seconds = self._smooth()

    def _smooth(self) -> list[float]:
        """Without noise: a larger size is never cheaper, and where nothing pads, costs rise ever faster.

        Noise only ever slows a step down, so a size costs at most what a larger one was seen to cost. A slope
        that falls by too much for noise stays.
        """
        rising = list(accumulate(reversed(self._seen()), min))[::-1]
        if self.staircase:
            return rising
        hull = _lower_hull(self.sizes, rising)
        return [max(low, cost / _NOISE) for low, cost in zip(hull, rising, strict=True)]

    def _seen(self) -> list[float]:
        """With what noise there is in it."""
        common = self._common
        return [cost * own * common for cost, own in zip(self._profile, self._own, strict=True)]

    def at(self, sizes: Floats | Sequence[float]) -> Floats:
        """Seconds at each size."""
        wanted, known = np.asarray(sizes, dtype=np.float64), np.array(self.seconds)
        if self.staircase:
            inside = known[np.minimum(np.searchsorted(self.sizes, wanted), len(known) - 1)]
        else:
            inside = np.interp(wanted, self.sizes, known)
        out: Floats = inside + self._slope(self.seconds) * np.maximum(wanted - self.sizes[-1], 0.0)
        return out

    def one(self, size: float) -> float:
        """Seconds at a single size."""
        return self._one(self.seconds, size)

    def several(self, first: int, count: int) -> list[float]:
        """Seconds at so many sizes, from the first on, one apart."""
        sizes, known, last = self.sizes, self.seconds, len(self.sizes) - 1
        right, out = min(bisect_left(sizes, first), last), []
        for size in range(first, first + count):
            while right < last and sizes[right] < size:
                right += 1
            if size > sizes[right]:
                out.append(self._one(known, size))
            elif right == 0 or self.staircase:
                out.append(known[right])
            else:
                share = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
                out.append(known[right] * share + known[right - 1] * (1.0 - share))
        return out

    def _one(self, known: Sequence[float], size: float) -> float:
        beyond = size - self.sizes[-1]
        if beyond > 0.0:
            return known[-1] + self._slope(known) * beyond
        around = self._around(size)
        if len(around) == 1:
            return known[around[0][0]]
        (right, share), (left, rest) = around
        return known[right] * share + known[left] * rest

    def _slope(self, known: Sequence[float]) -> float:
        """Past the last point."""
        if len(known) == 1:
            return 0.0
        return (known[-1] - known[-2]) / (self.sizes[-1] - self.sizes[-2])

    def refresh(self, size: float, seconds: float, weight: float) -> float:
        """A live step of this size took so long: move the curve by `weight` of what it was off.

        Returns the factor by which all sizes were moved.
        """
        # Against what was seen, not what is made of it, or a size that does cost more than the next would
        # for ever seem to say that all have become slower.
        expected = self._one(self._seen(), size)
        if expected <= 0.0:
            return 1.0
        ratio = min(max(seconds / expected, 1.0 / MOST_RATIO), MOST_RATIO)
        step = 1.0 + weight * _SPREAD * (ratio - 1.0)
        self._common *= step
        rest, back = weight * (ratio / step - 1.0), weight * _RETURN
        self._own = [own + back * (1.0 - own) for own in self._own]
        for point, share in self._around(size):
            self._own[point] *= 1.0 + share * rest
        self.seconds = self._smooth()
        return step

    def scale(self, factor: float) -> None:
        """Everything takes `factor` times as long."""
        self._common *= factor
        self.seconds = [cost * factor for cost in self.seconds]

    def _around(self, size: float) -> list[tuple[int, float]]:
        """The points that a size lies between, and how much of it is each."""
        right = min(bisect_left(self.sizes, size), len(self.sizes) - 1)
        left = max(right - 1, 0)
        if self.staircase or left == right or size >= self.sizes[-1]:
            return [(right, 1.0)]
        share = (size - self.sizes[left]) / (self.sizes[right] - self.sizes[left])
        return [(right, share), (left, 1.0 - share)]

    def to_list(self) -> list[tuple[float, float]]:
        """What was measured, as live steps have moved it and noise included: from it comes the same curve."""
        return list(zip(self.sizes, self._seen(), strict=True))


def _lower_hull(sizes: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """At each size the largest convex curve that is nowhere above these points."""
    corners: list[int] = []
    for place, (size, cost) in enumerate(zip(sizes, seconds, strict=True)):
        while len(corners) > 1:
            first, last = corners[-2], corners[-1]
            rise, run = seconds[last] - seconds[first], sizes[last] - sizes[first]
            if (cost - seconds[first]) * run >= rise * (size - sizes[first]):
                break
            corners.pop()
        corners.append(place)
    out = [seconds[0]]
    for first, last in pairwise(corners):
        slope = (seconds[last] - seconds[first]) / (sizes[last] - sizes[first])
        out += [seconds[first] + slope * (sizes[k] - sizes[first]) for k in range(first + 1, last)]
        out.append(seconds[last])
    return out
