"""Step 2 of `make gpu-check`: many steps of ever other shapes on the server's own engine.

Played twice, once as fast as steps go and once waiting for the device before each. The same steps must give
the same texts, bit for bit: a host buffer that is written again before it was copied gives others.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from deploy.gpu.check_step import StepOptions, shown, table_of
from deploy.gpu.drive import Driver, Steps, Text
from engine.params import SamplingParams


def run(options: StepOptions) -> dict[str, Any]:
    """Plays, compares, and counts the shapes of steps that there were."""
    steps = 30 if options.dry else 2000
    seen = Steps()
    parts = options.parts(
        seen, speculative_config=options.drafts, verify_policy="fixed:3", max_num_seqs=48, num_pages=2048
    )
    driver = Driver(parts)
    driver.use("fixed:3")
    found = []
    for pause in (False, True):
        seen.steps.clear()
        begun = time.perf_counter()
        texts = _play(driver, steps, pause, options.device)
        seconds = time.perf_counter() - begun
        found.append((texts, {(step.rows, step.sequences) for step in seen.steps}, seconds))
        parts.loop.pool.flush()
        parts.loop.pool.check()
    (fast, shapes, seconds), (slow, other, paused) = found
    differing = sum(a.tokens != b.tokens for a, b in zip(fast, slow, strict=True))
    return {
        "steps": steps,
        "shapes": len(shapes),
        "same_shapes": shapes == other,
        "texts": len(fast),
        "differing": differing,
        "failed": sum(text.finish == "error" for text in fast + slow),
        "seconds": seconds,
        "seconds_paused": paused,
        "passed": differing == 0 and all(text.finish != "error" for text in fast + slow),
    }


def _play(driver: Driver, steps: int, pause: bool, device: torch.device) -> list[Text]:
    """A fixed play of arrivals: bursts of short and long prompts, so that no two steps are alike for long."""
    rng = np.random.default_rng(1)
    vocab, texts, names = driver.parts.loop.intake.vocab_size, {}, []
    for number in range(steps):
        if number % 5 == 0:
            for _ in range(int(rng.integers(0, 9))):
                prompt = rng.integers(3, vocab, rng.integers(2, 200)).tolist()
                sampling = {"temperature": 0.0} if rng.random() < 0.5 else {"seed": number, "top_p": 0.9}
                params = SamplingParams(max_tokens=int(rng.integers(1, 40)), ignore_eos=True, **sampling)
                names.append(driver.add(prompt, params))
        if pause and device.type == "cuda":
            torch.cuda.synchronize()
        driver.step(texts)
    for name in list(driver.parts.loop.requests):
        driver.parts.loop.abort(name)
    driver.parts.loop.drain_aborted()
    return [texts.get(name, Text()) for name in names]


def table(result: dict[str, Any]) -> str:
    names = ("steps", "shapes", "texts", "differing", "failed", "seconds", "seconds_paused")

    return table_of(names, [[shown(result[name]) for name in names]])
