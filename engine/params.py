"""Sampling parameters of a request, checked once at the door so that the engine never meets a bad value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


class ParamError(ValueError):
    """A parameter is out of range. `param` names it and `code` classifies it, for the HTTP layer."""

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen; the same for each of its `n` choices.

    `temperature` 0 is greedy. `top_k` 0 or -1 and `top_p` 1 and `min_p` 0 are off. `seed` switches to
    coupled sampling: the text becomes a function of prompt, parameters, seed and model.
    `max_tokens` None means "as much as the context allows"; the engine resolves it at submission.
    0 generates nothing: the prompt is computed, and reported on if that was asked for.
    `logprobs` None is off, 0 reports the chosen token only, N adds the N likeliest alternatives;
    `prompt_logprobs` is the same for the tokens of the prompt, of which the first has none.
    `allowed_token_ids` None allows all. `bad_words` are sequences of tokens: the last one of a sequence is
    forbidden where the output ends with those before it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def check(self, vocab_size: int, max_logprobs: int = 20, max_n: int = 128) -> None:
        """Raise ParamError for the first value that is out of range (the ranges are vLLM's).

        One range is tighter than vLLM's: a temperature between 0 and 0.01 is refused, since dividing
        fp32 logits by it overflows; 0 itself is greedy.
        """

        def need(ok: bool, param: str, message: str) -> None:
            if not ok:
                raise ParamError(param, message)

        finite = math.isfinite
        need(
            self.temperature == 0.0 or 0.01 <= self.temperature <= 2.0,
            "temperature",
            f"temperature must be 0 or in [0.01, 2], got {self.temperature}",
        )
        need(0.0 < self.top_p <= 1.0, "top_p", f"top_p must be in (0, 1], got {self.top_p}")
        need(self.top_k >= -1, "top_k", f"top_k must be -1 (off), 0 (off) or positive, got {self.top_k}")
        need(0.0 <= self.min_p <= 1.0, "min_p", f"min_p must be in [0, 1], got {self.min_p}")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            need(-2.0 <= value <= 2.0, name, f"{name} must be in [-2, 2], got {value}")
        need(
            finite(self.repetition_penalty) and 0.0 < self.repetition_penalty <= 10.0,
            "repetition_penalty",
            f"repetition_penalty must be in (0, 10], got {self.repetition_penalty}",
        )
        # As many as a vocabulary has tokens, and this runs on the event loop: no work for each of them.
        for name in ("logit_bias", "allowed_token_ids", "stop_token_ids"):
            tokens = getattr(self, name) or (0,)
            least, most = min(tokens), max(tokens)
            worst = least if least < 0 else most
            need(0 <= worst < vocab_size, name, f"{name}: token {worst} is not in the vocabulary")
        gentle = all(-100.0 <= bias <= 100.0 for bias in self.logit_bias.values())
        need(gentle, "logit_bias", "logit_bias must be in [-100, 100]")
        need(self.allowed_token_ids != (), "allowed_token_ids", "allowed_token_ids must not be empty")
        for word in self.bad_words:
            known = word != () and all(0 <= token < vocab_size for token in word)
            need(known, "bad_words", "a bad word must consist of tokens of the vocabulary")
        need(self.min_tokens >= 0, "min_tokens", f"min_tokens must not be negative, got {self.min_tokens}")
        if self.max_tokens is not None:
            need(
                self.max_tokens >= 0, "max_tokens", f"max_tokens must not be negative, got {self.max_tokens}"
            )
            need(
                self.min_tokens <= self.max_tokens,
                "min_tokens",
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})",
            )
        need(len(self.stop) <= 16, "stop", f"at most 16 stop strings, got {len(self.stop)}")
        for text in self.stop:
            need(text != "", "stop", "a stop string must not be empty")
            need(len(text) <= 1024, "stop", "a stop string may have at most 1024 characters")
        if self.seed is not None:
            need(-(2**63) <= self.seed < 2**63, "seed", "seed must fit in 64 bits")
        need(1 <= self.n <= max_n, "n", f"n must be in [1, {max_n}], got {self.n}")
        most = min(max_logprobs, vocab_size)
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(self, name)
            if wanted is not None:
                need(0 <= wanted <= most, name, f"{name} must be in [0, {most}], got {wanted}")
