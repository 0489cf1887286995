"""Distributions of lengths: a number, or a law with two parameters."""

from __future__ import annotations

import random
from dataclasses import dataclass

_LAWS = ("uniform", "normal", "lognormal")
_MOST = float("inf")


@dataclass(frozen=True, slots=True)
class Lengths:
    """`fixed:a`, `uniform:a,b` (both included), `normal:mean,deviation`, `lognormal:median,sigma`."""

    law: str
    a: float
    b: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Raises ValueError, naming what is allowed."""
        law, _, numbers = text.rpartition(":")
        try:
            values = [float(number) for number in numbers.split(",")]
            if not law and len(values) == 1 and values[0] >= 1:
                return cls("fixed", values[0])
            ordered = law != "uniform" or values[0] <= values[-1]
            if law in _LAWS and len(values) == 2 and ordered and values[0] >= 1 and 0 <= values[1] < _MOST:
                return cls(law, *values)
        except ValueError:
            pass
        raise ValueError(
            f"{text!r} is no length: give N, uniform:LEAST,MOST, normal:MEAN,DEVIATION or "
            "lognormal:MEDIAN,SIGMA"
        )

    def __str__(self) -> str:
        return f"{self.a:g}" if self.law == "fixed" else f"{self.law}:{self.a:g},{self.b:g}"

    def draw(self, rng: random.Random) -> int:
        """At least 1."""
        if self.law == "fixed":
            return int(self.a)
        if self.law == "uniform":
            return rng.randint(int(self.a), int(self.b))
        if self.law == "normal":
            return max(1, round(rng.gauss(self.a, self.b)))
        return max(1, round(self.a * rng.lognormvariate(0.0, self.b)))
