"""The default model in fp32: greedy texts equal transformers', seeded ones do not depend on company.

Floating point sums differ between batch shapes, so two runs may part where two tokens are equally good up
to rounding; a test that sees a divergence checks that this is so, and prints it.
"""

from __future__ import annotations

import pytest
import torch

from engine.noise import gumbels, row_keys
from tests.engine import real

pytestmark = [pytest.mark.model, pytest.mark.slow]

#: logits closer than this count as equal
NEAR_TIE = 1e-3


def first_difference(a: list[int], b: list[int]) -> int | None:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def check_equal_up_to_ties(prompt, a, b, noise=lambda position: 0.0):
    """Both texts are equal, or part where the two tokens' scores differ by less than NEAR_TIE."""
    at = first_difference(a, b)
    if at is None:
        return 0
    assert at < min(len(a), len(b)), "one text ends early"
    logits = real.logits_after(prompt + a[:at])
    scores = logits + noise(len(prompt) + at)
    gap = float((scores[a[at]] - scores[b[at]]).abs())
    print(f"divergence at output token {at}: {a[at]} or {b[at]}, gap {gap:.2e}")
    assert gap < NEAR_TIE
    return 1


def test_greedy_text_equals_transformers_generate():
    """20 texts. What `generate` would choose is read off one forward over each of our texts: as long as
    every token of ours is the argmax after those before it, `generate` writes the same text."""
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(real.folder(), dtype=torch.float32)
    prompts = [real.chat(prompt) for prompt in real.PROMPTS]
    ours = real.generate([(prompt, {"temperature": 0.0, "max_tokens": 32}) for prompt in prompts], "fixed:4")
    ties = 0
    for prompt, (text,) in zip(prompts, ours, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + text])).logits[0, len(prompt) - 1 : -1]
        gaps = logits.amax(-1) - logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        for at in (gaps > 0).nonzero()[:1, 0].tolist():  # behind the first difference texts differ anyway
            print(f"divergence at output token {at}, gap {gaps[at]:.2e}")
            assert gaps[at] < NEAR_TIE
            ties += 1
    print(f"{ties} of {len(prompts)} texts part at a near-tie")

    prompt = prompts[1]
    written = reference.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=2)
    check_equal_up_to_ties(prompt, ours[1][0][:12], written[0, len(prompt) :].tolist())


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"top_p": 0.9, "top_k": 50},
        {"min_p": 0.05, "presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {198: -2.0}},
    ],
    ids=["plain", "filters", "penalties"],
)
def test_seeded_text_is_the_same_with_speculation_and_in_company(extra):
    params = {"seed": 1234, "temperature": 0.8, "max_tokens": 32, **extra}
    others = [(real.chat(prompt), {"max_tokens": 24}) for prompt in real.PROMPTS[4:20]]
    prompt = real.chat(real.PROMPTS[2])
    alone = real.generate([(prompt, params)])[0][0]
    speculating = real.generate([(prompt, params)], "fixed:4")[0][0]
    crowded = real.generate([*others, (prompt, params)], "fixed:4")[-1][0]

    def noise(position: int) -> torch.Tensor:
        keys = row_keys(torch.tensor([1234]), torch.tensor([0]), torch.tensor([position]))
        vocab = real.parts().loop.intake.vocab_size
        # scores are compared in units of logits: log p + G = logit / T + G + const
        return 0.8 * gumbels(keys, torch.arange(vocab, dtype=torch.int32))[0]

    check_equal_up_to_ties(prompt, alone, speculating, noise)
    check_equal_up_to_ties(prompt, alone, crowded, noise)


def test_prefix_cache_leaves_the_text_alone():
    prompt = real.chat("Repeat after me: " + "the quick brown fox jumps over the lazy dog. " * 6)
    params = {"temperature": 0.0, "max_tokens": 24}
    cold = real.generate([(prompt, params)])[0][0]
    loop = real.parts().loop
    from engine.params import SamplingParams
    from engine.request import Request

    texts = []
    for name in ("first", "second"):
        active = loop.add(Request(name, prompt, SamplingParams(**params), "shared"))
        text: list[int] = []
        while loop.has_work:
            batch = loop.begin()
            for _, delta in loop.commit(batch, real.parts().worker.run(batch)):
                text += delta.token_ids
        texts.append((text, active.usage.cached_tokens))
    (first, none), (second, cached) = texts
    assert none == 0
    assert cached >= len(prompt) - 17
    check_equal_up_to_ties(prompt, cold, first)
    check_equal_up_to_ties(prompt, cold, second)
