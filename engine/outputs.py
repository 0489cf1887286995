"""What the engine tells its user: pieces of text per choice, and figures per request and per step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of one token under the model's own softmax.

    Before temperature, filters, bias and penalties; `top` holds (token id, logprob) of the likeliest
    alternatives, best first (empty when the request asked for none). `rank` (1: the likeliest) is counted for
    tokens of the prompt only.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """What one step gave a choice: so many `tokens`, of which the first `accepted` were drafts.

    It had verified so many drafts; the token after the accepted ones is the target's own.
    """

    verified: int
    accepted: int
    tokens: int


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """The next piece of one choice's output. `text` may be empty (held back, or half a character).

    The last delta of a choice carries `finish_reason`; `stop_reason` is the stop string or the stop token id
    that ended it (None for end-of-sequence). Concatenating every `text` of a choice gives its whole text.
    `error` explains finish_reason "error". `prompt_logprobs`, of all prompt tokens but the first, come with
    a choice's first delta if they were asked for. `rounds` says how `token_ids` came about, step by step.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    rounds: tuple[Round, ...] = ()


@dataclass(slots=True)
class Usage:
    """Token counts of a request, over all its choices (the prompt counted once)."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestStats:
    """One request, as far as it has come; times in seconds from its arrival.

    `ttft` is None before its first token, `e2e` lasts until its last one. `verified` and `accepted` drafts
    have an entry for each round that verified any.
    """

    finish_reason: FinishReason | None
    queue_time: float
    ttft: float | None
    e2e: float
    usage: Usage
    preemptions: int
    verified: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    choices: int = 1


#: why nothing was drafted in a step in which sequences sampled
Undrafted = Literal["off", "request", "does_not_pay", "collapsed", "kv_pressure"]


@dataclass(frozen=True, slots=True)
class Forecast:
    """What was expected of a step when it was latched: tokens, seconds (0: nobody knows).

    `accepted` drafts of each of its sequences.
    """

    tokens: float = 0.0
    seconds: float = 0.0
    accepted: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepStats:
    """One engine step; times in seconds, `begun` and others on `time.perf_counter`'s clock.

    `verified` has one entry a decoding sequence: drafted tokens that were verified (0: plain decode).
    `waiting`, `accepted` and `expected` are parallel to it: drafts that waited to be verified, that were
    accepted, bonus not counted, and that were expected to be. `slots`: tokens that a model was to draft, an
    entry a sampling sequence. `capacity`: rows that drafts could have had. `emitted` counts tokens that users
    got, `decided` those too that a stop string or an abort cut off.
    """

    step_time: float
    forward_time: float
    draft_time: float
    rows: int
    prefill_rows: int
    sequences: int
    emitted: int
    verified: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    corrupted: int = 0
    waiting: tuple[int, ...] = ()
    expected: tuple[float, ...] = ()
    slots: tuple[int, ...] = ()
    capacity: int = 0
    undrafted: Undrafted | None = None
    forecast_tokens: float = 0.0
    forecast_time: float = 0.0
    begun: float = 0.0
    latch_time: float = 0.0
    worker_begun: float = 0.0
    verify_time: float = 0.0
    commit_begun: float = 0.0
    decided: int = 0


@dataclass(frozen=True, slots=True)
class EngineGauges:
    """The engine at one moment. `kv_usage` is the share of pages that live sequences hold.

    `calibration_errors`: (regime, expected calibration error of conditional acceptance), where known.
    """

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    kv_usage: float = 0.0
    pages_free: int = 0
    pages_cached: int = 0
    pages_total: int = 0
    calibration_errors: tuple[tuple[str, float], ...] = ()
    collapsed: bool = False


class EngineObserver(Protocol):
    """Receives figures on the event loop; must be quick and must not raise."""

    def step(self, stats: StepStats) -> None: ...
    def first_token(self, seconds: float) -> None: ...
    def inter_token(self, seconds: float, tokens: int) -> None:
        """`tokens` arrived together, `seconds` after the choice's previous ones."""

    def finished(self, stats: RequestStats) -> None: ...
    def preempted(self) -> None: ...
    def prefix_cache(self, queried_tokens: int, hit_tokens: int) -> None: ...


class NullObserver:
    """Ignores everything."""

    def step(self, stats: StepStats) -> None: ...
    def first_token(self, seconds: float) -> None: ...
    def inter_token(self, seconds: float, tokens: int) -> None: ...
    def finished(self, stats: RequestStats) -> None: ...
    def preempted(self) -> None: ...
    def prefix_cache(self, queried_tokens: int, hit_tokens: int) -> None: ...
