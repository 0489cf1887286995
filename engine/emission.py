"""From a verdict to a piece of output: text, stop strings, and whether this is the end."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.batch import Verdict
from engine.outputs import FinishReason, OutputDelta, Round, TokenLogprob
from engine.sequence import Sequence

#: of the ends that are somebody's fault, what to tell
FAULTS = {
    "error": "the model returned values that are not finite",
    "forbidden": "what the request allows leaves no token to go on with",
}


@dataclass(frozen=True, slots=True)
class Emission:
    """What one step adds to a choice; fields as in OutputDelta."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: FinishReason | None
    reason: str | int | None
    prompt_logprobs: tuple[TokenLogprob, ...]
    round: Round

    def delta(self, choice: int, error: str | None = None) -> OutputDelta:
        """The same for the user."""
        return OutputDelta(
            choice,
            self.text,
            self.tokens,
            self.logprobs,
            self.finish,
            self.reason,
            error,
            self.prompt_logprobs,
            (self.round,),
        )


def emit(
    sequence: Sequence,
    verified: int,
    verdict: Verdict,
    eos_ids: frozenset[int],
    prompt: Seq[TokenLogprob] = (),
) -> Emission:
    """Feed a verdict's tokens to the sequence's text, and cut all of them behind a stop string.

    A stop token counts as a token but is not part of the text, unless the request wants it there. A stop
    string wins over a length limit reached by the same step, since it ends the text earlier. `prompt` are the
    prompt's log probabilities, which go out with the first tokens.
    """
    stream, tokens, text = sequence.text, verdict.tokens, ""
    params = sequence.state.params
    finish: FinishReason | None = "error" if verdict.finish == "forbidden" else verdict.finish
    reason: str | int | None = None
    silent = verdict.stop_token is not None and not params.include_stop_str_in_output
    spoken = tokens[:-1] if silent else tokens
    for index, token in enumerate(spoken):
        text += stream.push(token)
        if stream.stopped_by is not None:
            tokens = tokens[: index + 1]
            break
    if finish is not None:
        text += stream.finish()
    if stream.stopped_by is not None:
        finish, reason = "stop", stream.stopped_by
    elif verdict.stop_token is not None and (verdict.stop_token not in eos_ids or params.ignore_eos):
        reason = verdict.stop_token
    first = sequence.generated == 0
    logprobs = verdict.logprobs[: len(tokens)]
    made = Round(verified, min(verdict.accepted, len(tokens)), len(tokens))
    return Emission(text, tokens, logprobs, finish, reason, tuple(prompt) if first else (), made)
