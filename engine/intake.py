"""The engine's door: checks a request and makes the sequences that will run for it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np

from engine.noise import split_stream
from engine.outputs import Usage
from engine.params import ParamError, SamplingParams
from engine.request import ActiveRequest, Request
from engine.sampling import SamplingState
from engine.sequence import Sequence
from engine.text import TextStream


class Intake:
    """Knows the limits of this engine and its vocabulary."""

    def __init__(
        self,
        vocab_size: int,
        max_model_len: int,
        eos_ids: frozenset[int],
        token_bytes: Seq[bytes],
        special_ids: frozenset[int] = frozenset(),
        *,
        max_logprobs: int = 20,
        max_n: int = 128,
        prefix_caching: bool = True,
        page_salt: str = "",
        seed: int | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.eos_ids = eos_ids
        self.token_bytes = token_bytes
        self.special_ids = special_ids
        self.max_logprobs = max_logprobs
        self.max_n = max_n
        self.prefix_caching = prefix_caching
        self.page_salt = page_salt
        self._keys = itertools.count()
        self._random: random.Random = random.SystemRandom() if seed is None else random.Random(seed)

    def check(self, request: Request) -> None:
        """Raise ParamError when the request could never run here."""
        request.params.check(self.vocab_size, self.max_logprobs, self.max_n)
        prompt = np.asarray(request.prompt_token_ids, dtype=np.int64)
        if not len(prompt):
            raise ParamError("prompt", "the prompt must have at least one token")
        if int(prompt.min()) < 0 or int(prompt.max()) >= self.vocab_size:
            raise ParamError("prompt", f"token ids must be in [0, {self.vocab_size})")
        params = request.params
        wanted = 1 if params.max_tokens is None else params.max_tokens
        if len(prompt) + min(wanted, 1) > self.max_model_len:
            raise ParamError(
                "prompt",
                f"the prompt has {len(prompt)} tokens, and this model's context holds {self.max_model_len} "
                "with the output",
                code="context_length_exceeded",
            )
        if len(prompt) + wanted > self.max_model_len:
            raise ParamError(
                "max_tokens",
                f"{len(prompt)} prompt tokens and max_tokens {wanted} exceed this model's context "
                f"of {self.max_model_len} tokens",
                code="context_length_exceeded",
            )
        if request.speculative_tokens is not None and request.speculative_tokens < 0:
            raise ParamError("num_speculative_tokens", "num_speculative_tokens must not be negative")
        self._check_choice(params)

    def accept(self, request: Request, now: float) -> ActiveRequest:
        """Check a request and make its sequences, one a choice. Raises ParamError."""
        self.check(request)
        params = request.params
        if params.max_tokens is None:
            params = replace(params, max_tokens=self.max_model_len - len(request.prompt_token_ids))
        stop_ids = self._stop_ids(params)
        prompt = np.asarray(request.prompt_token_ids, dtype=np.int32)
        # Without prefix caching, pages are shared by the choices of one request and by nobody else.
        salt = f"{self.page_salt}|{request.cache_salt}"
        if not self.prefix_caching:
            salt += f"|{self._random.getrandbits(64):x}"
        active = ActiveRequest(request, now, Usage(prompt_tokens=len(prompt)))
        skip = self.special_ids - request.spoken_ids if params.skip_special_tokens else frozenset()
        first: SamplingState | None = None
        for choice in range(params.n):
            stream = split_stream(self._random.getrandbits(128))
            grammar = request.grammar.begin(stop_ids, self.vocab_size) if request.grammar else None
            if first is None:
                tokens = prompt.tolist()
                state = first = SamplingState(
                    params, self.vocab_size, stop_ids, tokens, choice, stream, grammar
                )
            else:
                state = first.sibling(choice, stream, grammar)
            text = TextStream(
                self.token_bytes, skip, params.stop, params.include_stop_str_in_output, params.min_tokens
            )
            # The first choice scores the prompt for all of them: they wait for it anyway.
            to_score = len(prompt) - 1 if params.prompt_logprobs is not None and choice == 0 else 0
            active.sequences.append(
                Sequence(next(self._keys), choice, prompt, state, text, salt, request.priority, to_score)
            )
        return active

    def budget(self, sequence: Sequence) -> int:
        """How many tokens the sequence may still emit."""
        wanted = sequence.state.params.max_tokens
        left = self.max_model_len - sequence.length
        return left if wanted is None else min(wanted - sequence.generated, left)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_ids)

    def _check_choice(self, params: SamplingParams) -> None:
        """Refuse what leaves no token to choose from, from the start."""
        if params.allowed_token_ids is None:
            return
        left = set(params.allowed_token_ids) - {word[0] for word in params.bad_words if len(word) == 1}
        if params.min_tokens:
            left -= self._stop_ids(params)
        if not left:
            message = "bad_words and min_tokens leave none of allowed_token_ids to choose from"
            raise ParamError("allowed_token_ids", message)
