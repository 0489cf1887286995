"""The processed distribution, restated from the documentation in plain Python, one token after another.

Shares no code with the engine, so that both can be wrong only in the same place by thinking so twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence

from engine.params import SamplingParams


def adjusted(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    stop_ids: Collection[int] = (),
) -> list[float]:
    """Logits after bias, forbidden tokens, minimum length and penalties, for the token behind `output`."""
    counts = Counter(output)
    known = set(prompt) | set(output)
    result = []
    for token, logit in enumerate(logits):
        z = logit + params.logit_bias.get(token, 0.0)
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            z = -math.inf
        said = (*output, token)
        for word in params.bad_words:
            if said[len(said) - len(word) :] == word and len(word) <= len(said):
                z = -math.inf
        if token in stop_ids and len(output) < params.min_tokens:
            z = -math.inf
        if token in known and params.repetition_penalty != 1.0:
            z = z / params.repetition_penalty if z > 0 else z * params.repetition_penalty
        if counts[token]:
            z -= params.presence_penalty + params.frequency_penalty * counts[token]
        result.append(z)
    return result


def filtered(logits: Sequence[float], params: SamplingParams) -> tuple[list[float], float]:
    """The law of adjusted logits, and by how much the closest decision of a filter was taken.

    A margin near zero means that rounding may decide otherwise. It is relative for min-p, absolute for top-p.
    """
    top = max(logits)
    if params.temperature == 0.0:
        law = [0.0] * len(logits)
        law[list(logits).index(top)] = 1.0
        return law, math.inf
    p = [math.exp((z - top) / params.temperature) for z in logits]
    total = math.fsum(p)
    p = [w / total for w in p]
    ranked = sorted(range(len(p)), key=lambda token: (-p[token], token))
    margin = math.inf
    if params.min_p > 0.0:
        least = params.min_p * p[ranked[0]]
        margin = min((abs(w / least - 1.0) for w in p if w != least), default=margin)
        ranked = [token for token in ranked if p[token] >= least]
    if params.top_k > 0:
        ranked = ranked[: params.top_k]
    if params.top_p < 1.0:
        enough = params.top_p * math.fsum(p[token] for token in ranked)
        nucleus: list[int] = []
        mass = 0.0
        for token in ranked:
            nucleus.append(token)
            mass += p[token]
            margin = min(margin, abs(mass - enough))
            if mass >= enough:
                break
        ranked = nucleus
    total = math.fsum(p[token] for token in ranked)
    law = [0.0] * len(p)
    for token in ranked:
        law[token] = p[token] / total
    return law, margin


def plain_law(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    stop_ids: Collection[int] = (),
) -> list[float]:
    """Probability of each token after `prompt` and `output`; one-hot for a greedy request."""
    law, margin = filtered(adjusted(logits, params, prompt, output, stop_ids), params)
    assert margin > 1e-9, "a filter's decision hangs on rounding: choose another example"
    return law
