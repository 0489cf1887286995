"""A request as the user states it, and as the engine follows it through its life."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.outputs import Usage
from engine.params import SamplingParams
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Request:
    """What to generate. `cache_salt` keeps its cached pages apart from everybody else's.

    `speculative_tokens` caps the drafts verified for it in a step (None: the policy decides, 0: none).
    """

    request_id: str
    prompt_token_ids: Seq[int]
    params: SamplingParams
    cache_salt: str = ""
    speculative_tokens: int | None = None


@dataclass(slots=True)
class ActiveRequest:
    """A request in the engine; times from the engine's clock."""

    request: Request
    arrived: float
    usage: Usage
    sequences: list[Sequence] = field(default_factory=list)
    admitted: float | None = None
    first_token: float | None = None
    preemptions: int = 0

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)
