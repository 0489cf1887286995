"""A request as the user states it, and as the engine follows it through its life."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.grammar import Grammar
from engine.outputs import FinishReason, RequestStats, TokenLogprob, Usage
from engine.params import SamplingParams
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Request:
    """What to generate. `cache_salt` keeps its cached pages apart from everybody else's.

    `speculative_tokens` caps the drafts verified for it in a step (None: the policy decides, 0: none).
    Of requests that wait, and when pages run out, those of lower `priority` go first; then by arrival. Texts
    keep to `grammar`. `spoken_ids` are special tokens that belong to the text all the same.
    """

    request_id: str
    prompt_token_ids: Seq[int]
    params: SamplingParams
    cache_salt: str = ""
    speculative_tokens: int | None = None
    priority: int = 0
    grammar: Grammar | None = None
    spoken_ids: frozenset[int] = frozenset()


@dataclass(slots=True)
class ActiveRequest:
    """A request in the engine; times from the engine's clock."""

    request: Request
    arrived: float
    usage: Usage
    sequences: list[Sequence] = field(default_factory=list)
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    preemptions: int = 0
    verified: list[int] = field(default_factory=list)  # drafts, one entry a round that verified any
    accepted: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    def count(self, verified: int, accepted: int, tokens: int) -> None:
        """A round of one of its sequences is over, which emitted so many tokens."""
        usage = self.usage
        usage.completion_tokens += tokens
        if verified:
            usage.draft_tokens += verified
            usage.accepted_tokens += accepted
            self.verified.append(verified)
            self.accepted.append(accepted)

    def stats(self, now: float, finish: FinishReason | None = None) -> RequestStats:
        """Its figures at this moment."""
        return RequestStats(
            finish,
            (self.admitted if self.admitted is not None else now) - self.arrived,
            None if self.first_token is None else self.first_token - self.arrived,
            (now if self.last_token is None else self.last_token) - self.arrived,
            self.usage,
            self.preemptions,
            tuple(self.verified),
            tuple(self.accepted),
            len(self.sequences),
        )
