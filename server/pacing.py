"""Fewer, larger chunks: pieces of a choice wait until they hold so many tokens."""

from __future__ import annotations

from collections.abc import Sequence

from engine.outputs import OutputDelta


class Pacer:
    """For one stream. A choice's first piece and its last never wait."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._waiting: dict[int, list[OutputDelta]] = {}

    def add(self, index: int, delta: OutputDelta) -> OutputDelta | None:
        """What to send of choice `index` now: all that has gathered, or nothing yet."""
        first = index not in self._waiting
        waiting = self._waiting.setdefault(index, [])
        waiting.append(delta)
        tokens = sum(len(each.token_ids) for each in waiting)
        if not first and delta.finish_reason is None and tokens < self._interval:
            return None
        self._waiting[index] = []
        return joined(waiting)


def joined(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Successive pieces of one choice as one."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return OutputDelta(
        last.index,
        "".join(each.text for each in deltas),
        tuple(token for each in deltas for token in each.token_ids),
        tuple(entry for each in deltas for entry in each.logprobs),
        last.finish_reason,
        last.stop_reason,
        last.error,
        deltas[0].prompt_logprobs,
        tuple(made for each in deltas for made in each.rounds),
    )
