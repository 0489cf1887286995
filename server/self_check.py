"""Does a draft model fit its target? A wrong guess about slots or layers crashes nothing. It just fails.

So a draft model that did not come with us answers one prompt before it serves, every draft verified.
"""

from __future__ import annotations

import logging

from drafters.hybrid import HybridDrafter
from engine.loop import EngineLoop
from engine.outputs import NullObserver
from engine.params import SamplingParams
from engine.request import Request
from engine.speculation import Speculation
from engine.worker import Worker
from scheduler.policy import Fixed

log = logging.getLogger("dspark")

PROMPT = "Count from one to thirty in words, then list the days of the week and the months of the year."
_TOKENS = 64
#: accepted length, bonus included, below which something must be wrong
SUSPICIOUS = 1.1


def self_check(loop: EngineLoop, worker: Worker, prompt: list[int]) -> float | None:
    """Accepted length of the draft model on a greedy text; warns if hardly anything is accepted.

    None where the context is too short for it. For a loop that has not served yet, and leaves it so.
    """
    room = min(_TOKENS, loop.intake.max_model_len - len(prompt))
    if room < 1:
        return None
    before = loop.speculation, loop.observer, worker.drafter
    gamma = before[0].gamma
    loop.speculation, loop.observer = Speculation(Fixed(gamma), gamma), NullObserver()
    if isinstance(worker.drafter, HybridDrafter):
        worker.drafter = worker.drafter.model
    request = Request("self-check", prompt, SamplingParams(temperature=0.0, max_tokens=room, ignore_eos=True))
    try:
        active = loop.add(request)
        while loop.has_work:
            batch = loop.begin()
            if batch is None:
                break
            loop.commit(batch, worker.run(batch))
    finally:
        loop.speculation, loop.observer, worker.drafter = before
        loop.pool.flush()
    tau = 1.0 + sum(active.accepted) / max(1, len(active.accepted))
    if tau < SUSPICIOUS:
        log.warning(
            "the draft model's tokens are hardly ever accepted (%.2f tokens a round on a test text): it may "
            "be for another target, or its config.json may mean other layers or slots than it says",
            tau,
        )
    return tau
