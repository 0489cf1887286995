"""Service level objectives: what a request must keep to be good, and how many must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.record import Record

METRICS = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper limits in seconds, all of which a request must keep."""

    limits: tuple[tuple[str, float], ...]

    @classmethod
    def parse(cls, words: Sequence[str]) -> Slo:
        """From words such as ttft:200, in milliseconds. Raises ValueError, naming what is allowed."""
        limits: dict[str, float] = {}
        for word in words:
            name, _, text = word.partition(":")
            try:
                milliseconds = float(text)
            except ValueError:
                milliseconds = 0.0
            if name not in METRICS or not 0.0 < milliseconds < float("inf") or name in limits:
                raise ValueError(
                    f"--slo {word!r}: give each of {', '.join(METRICS)} once as NAME:MILLISECONDS"
                )
            limits[name] = milliseconds / 1e3
        return cls(tuple(limits.items()))

    def __str__(self) -> str:
        return " ".join(f"{name}:{1e3 * limit:g}" for name, limit in self.limits)

    def kept(self, record: Record, name: str, limit: float) -> bool:
        """Whether an attempted request kept one limit.

        A request that failed kept none. A single token has no time per token: that counts as zero.
        """
        if not record.ok:
            return False
        value: float | None = getattr(record, name)
        return (name == "tpot") if value is None else value <= limit

    def good(self, record: Record) -> bool:
        """Whether it kept them all."""
        return record.ok and all(self.kept(record, name, limit) for name, limit in self.limits)
