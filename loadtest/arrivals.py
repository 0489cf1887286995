"""When an open loop sends: drawn before the run, so that no slow reply can delay what comes after it."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Arrivals at `rate` a second, moving evenly to `rate_to` over the run.

    Gaps follow a gamma law of shape `burstiness`: 1 is Poisson, less is burstier, infinity is a metronome.
    """

    rate: float
    rate_to: float | None = None
    burstiness: float = 1.0

    def expected(self, seconds: float) -> float:
        """Arrivals within the first `seconds` of a run, given that it is `seconds` long."""
        return seconds * (self.rate + self.end) / 2

    def times(self, seconds: float, seed: int) -> list[float]:
        """Arrival times from 0 to `seconds`, sorted.

        Their number is the expected one, so that a short run has no drift in its rate.
        """
        count = round(self.expected(seconds))
        if count == 0:
            return []
        rng = random.Random(seed)
        if math.isinf(self.burstiness):
            gaps = [1.0] * count
        else:
            gaps = [rng.gammavariate(self.burstiness, 1.0 / self.burstiness) for _ in range(count)]
        # Half of the first gap lies before the run and as much after it.
        scale = self.expected(seconds) / sum(gaps)
        return [self._when((place - gaps[0] / 2) * scale, seconds) for place in accumulate(gaps)]

    @property
    def end(self) -> float:
        """The rate that it ends with."""
        return self.rate if self.rate_to is None else self.rate_to

    def _when(self, arrivals: float, seconds: float) -> float:
        """The time by which so many are expected: the inverse of rate * t + growth * t^2 / 2."""
        growth = (self.end - self.rate) / seconds
        if growth == 0.0:
            return arrivals / self.rate
        root = math.sqrt(max(0.0, self.rate**2 + 2 * growth * arrivals))
        return min(seconds, 2 * arrivals / (self.rate + root))


@dataclass(frozen=True, slots=True)
class Timed:
    """One request of a trace: when, and what is known of it."""

    at: float
    prompt: str | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    #: names of the blocks that the prompt begins with; requests with the same blocks share a prefix
    blocks: tuple[int, ...] = ()


def read_trace(path: Path) -> list[Timed]:
    """A JSONL trace: `at` in seconds or `timestamp` in milliseconds, and any of prompt, input_length,
    output_length and hash_ids (as in the traces of Mooncake). Raises ValueError, naming the line."""
    requests = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            try:
                requests.append(_timed(json.loads(line)))
            except (ValueError, TypeError, AttributeError, KeyError) as error:
                raise ValueError(f"{path}:{number}: no request of a trace: {error}") from None
    if not requests:
        raise ValueError(f"{path} holds no requests")
    return sorted(requests, key=lambda request: request.at)


def _timed(raw: dict[str, Any]) -> Timed:
    at = float(raw["at"]) if "at" in raw else float(raw["timestamp"]) / 1e3
    if not 0.0 <= at < math.inf:
        raise ValueError(f"it cannot be sent at {at} s")
    given = raw.get("input_length"), raw.get("output_length")
    lengths = [None if value is None else max(1, int(value)) for value in given]
    prompt = raw.get("prompt")
    if prompt is None and lengths[0] is None:
        raise ValueError("it needs a prompt or an input_length")
    return Timed(at, prompt, lengths[0], lengths[1], tuple(int(block) for block in raw.get("hash_ids", ())))
