"""Step 3 of `make gpu-check`: greedy and seeded texts with and without drafts, and in smaller batches.

Kernels may add in another order for other batch shapes, so texts may part where two tokens are nearly
equal. How nearly is the gap between their log-probabilities, with the noise that decides where there is a
seed. Drafts change nothing else: gaps must be roundings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from deploy.gpu.check_step import StepOptions, shown, table_of
from deploy.gpu.drive import Driver, Steps, Text, prompts_of
from engine.noise import gumbels, row_keys
from engine.outputs import TokenLogprob
from engine.params import SamplingParams

#: in natural log-probability; bf16 logits of size 20 are rounded to 0.125 each
_WIDEST = 0.5


def run(options: StepOptions) -> dict[str, Any]:
    """A row for each way of sampling and each policy, compared with `off` and all texts at once."""
    count, length = (6, 12) if options.dry else (96, 128)
    parts = options.parts(
        Steps(),
        speculative_config=options.drafts,
        verify_policy="fixed:3",
        max_num_seqs=count,
        num_pages=4096,
    )
    driver, prompts = Driver(parts), prompts_of(parts, count, 60)
    parts.loop.speculation.throughput = parts.profile(False)
    ways = (("off", count), ("off", max(1, count // 8)), ("fixed:3", count), ("lookahead", count))
    rows = []
    for sampling in ("greedy", "seeded"):
        asked = list(zip(prompts, _params(sampling, count, length), strict=True))
        driver.use("off")
        plain = driver.answers(asked)
        for policy, at_once in ways:
            driver.use(policy)
            texts = driver.answers(asked, at_once)
            how = {"sampling": sampling, "policy": policy, "at_once": at_once, "texts": count}
            rows.append(how | _compared(asked, plain, texts))
    return {"rows": rows, "passed": all(row["largest_gap"] < _WIDEST for row in rows)}


def _params(sampling: str, count: int, length: int) -> list[SamplingParams]:
    """20 logprobs: enough to see both tokens where two texts part."""
    return [
        SamplingParams(
            temperature=0.0 if sampling == "greedy" else 1.0,
            seed=None if sampling == "greedy" else 100 + index,
            max_tokens=length,
            ignore_eos=True,
            logprobs=20,
        )
        for index in range(count)
    ]


def _compared(
    asked: Sequence[tuple[Sequence[int], SamplingParams]], plain: Sequence[Text], texts: Sequence[Text]
) -> dict[str, Any]:
    pairs = zip(asked, plain, texts, strict=True)
    gaps = [first_gap(a, b, len(prompt), params.seed) for (prompt, params), a, b in pairs]
    parted = [gap for gap in gaps if gap is not None]
    return {
        "tokens": sum(len(text.tokens) for text in texts),
        "diverged": len(parted),
        "median_gap": float(np.median(parted)) if parted else 0.0,
        "largest_gap": max(parted, default=0.0),
    }


def first_gap(a: Text, b: Text, start: int, seed: int | None) -> float | None:
    """How close the two tokens were where the texts part, by what decided in `a`; None if they never do."""
    for place, pair in enumerate(zip(a.tokens, b.tokens, strict=False)):
        if pair[0] != pair[1]:
            mine, theirs = scores(a.logprobs[place], pair, start + place, seed)
            return abs(mine - theirs)
    return None


def scores(row: TokenLogprob, pair: tuple[int, int], position: int, seed: int | None) -> tuple[float, float]:
    """What decided between two tokens: log-probabilities, with the seed's noise if there is one.

    A token that is not among those reported counts as the last of them: it was that good at most.
    """
    known = dict(row.top) | {row.token_id: row.logprob}
    found = [known.get(token, min(known.values())) for token in pair]
    if seed is not None:
        keys = row_keys(torch.tensor([seed]), torch.tensor([0]), torch.tensor([position]))
        noise = gumbels(keys, torch.tensor(pair, dtype=torch.int32))[0].tolist()
        found = [score + each for score, each in zip(found, noise, strict=True)]
    return found[0], found[1]


def table(result: dict[str, Any]) -> str:
    names = ("sampling", "policy", "at_once", "texts", "tokens", "diverged", "median_gap", "largest_gap")
    return table_of(names, [[shown(row[name]) for name in names] for row in result["rows"]])
