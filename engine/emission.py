"""From a verdict to a piece of output: text, stop strings, and whether this is the end."""

from __future__ import annotations

from dataclasses import dataclass

from engine.batch import Verdict
from engine.outputs import FinishReason, TokenLogprob
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Emission:
    """What one step adds to a choice; fields as in OutputDelta."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: FinishReason | None
    reason: str | int | None


def emit(sequence: Sequence, verdict: Verdict, eos_ids: frozenset[int]) -> Emission:
    """Feed a verdict's tokens to the sequence's text, and cut all of them behind a stop string.

    A stop token counts as a token but is not part of the text. A stop string wins over a length limit
    reached by the same step, since it ends the text earlier.
    """
    stream, tokens, text = sequence.text, verdict.tokens, ""
    finish: FinishReason | None = verdict.finish
    reason: str | int | None = None
    spoken = tokens[:-1] if verdict.stop_token is not None else tokens
    for index, token in enumerate(spoken):
        text += stream.push(token)
        if stream.stopped_by is not None:
            tokens = tokens[: index + 1]
            break
    if finish is not None:
        text += stream.finish()
    if stream.stopped_by is not None:
        finish, reason = "stop", stream.stopped_by
    elif verdict.stop_token is not None and (
        verdict.stop_token not in eos_ids or sequence.state.params.ignore_eos
    ):
        reason = verdict.stop_token
    return Emission(text, tokens, verdict.logprobs[: len(tokens)], finish, reason)
