"""What is written down about one request. Times are seconds of the monotonic clock of this machine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Literal

Outcome = Literal["pending", "ok", "error", "cancelled", "unfinished"]
Kind = Literal["load", "probe"]


@dataclass(slots=True)
class Record:
    """One request, from when it should have been sent until its stream was over.

    `intended` is when the schedule (or the user's think time) wanted it sent, `started` when the client got
    round to it, `queued` how long of that it waited for the client's own limit of requests in flight.
    `times[i]` is when chunk i arrived (all that one read brought), `counts[i]` the tokens that the server
    had counted by then, -1 where it does not say. Latencies begin at `intended`.
    """

    name: str
    kind: Kind = "load"
    intended: float = 0.0
    started: float = 0.0
    queued: float = 0.0
    sent: float | None = None
    #: first output: text of the answer or of reasoning, or a tool call; of an empty answer its end
    first_text: float | None = None
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    ended: float | None = None
    outcome: Outcome = "pending"
    error: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    #: as the server counts them in its last word about usage
    completion_tokens: int | None = None
    #: that the request asked for, where it insisted (ignore_eos)
    wanted_tokens: int | None = None

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"

    @property
    def lag(self) -> float:
        """Seconds by which the client was late, its own limit in flight aside."""
        return max(0.0, self.started - self.intended - self.queued)

    @property
    def tokens(self) -> int:
        """Tokens that reached us: the server's count, or chunks where it never counted."""
        if self.completion_tokens is not None:
            return self.completion_tokens
        return max(self.counts[-1], 0) if self.counts and self.counted else len(self.times)

    @property
    def counted(self) -> bool:
        """Whether every chunk came with the server's count of tokens."""
        return bool(self.counts) and min(self.counts) >= 0

    @property
    def progress(self) -> list[int]:
        """Tokens that had come with each chunk, at best knowledge.

        Without the server's counts, tokens are spread evenly over the chunks.
        """
        if self.counted or not self.times:
            return self.counts
        chunks, tokens = len(self.times), max(self.tokens, 1)
        return [max(1, round(tokens * (place + 1) / chunks)) for place in range(chunks)]

    @property
    def ttft(self) -> float | None:
        """To the first output."""
        return None if self.first_text is None else self.first_text - self.intended

    @property
    def e2e(self) -> float | None:
        """To the end of the stream."""
        return None if self.ended is None else self.ended - self.intended

    @property
    def tpot(self) -> float | None:
        """Seconds a token after the first chunk: what came with that took no time of its own.

        With one token in the first chunk this is the usual (E2E - TTFT) / (tokens - 1). None where all
        came at once.
        """
        progress = self.progress
        if len(self.times) < 2 or progress[-1] <= progress[0]:
            return None
        return (self.times[-1] - self.times[0]) / (progress[-1] - progress[0])

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks."""
        return [later - earlier for earlier, later in zip(self.times, self.times[1:], strict=False)]

    @property
    def gap_tokens(self) -> list[int]:
        """Tokens that came with each chunk after the first."""
        progress = self.progress
        return [later - earlier for earlier, later in itertools.pairwise(progress)]
