"""The default model on the kernels: texts equal to the last token, alone and in a crowd, drafted or not.

No near-tie clause here: a row's bits depend on the row alone.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.batch import VerificationBatch
from engine.models.config import ModelConfig
from engine.native.loader import supported
from engine.native.weights import load_weights
from engine.native_executor import NativeExecutor
from tests.engine import real
from tests.engine.invariance import check_random_batches
from tests.engine.test_forward import item

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(not supported(), reason="the kernels were not built"),
]

KINDS = ["bf16", "gguf"]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_do_not_depend_on_speculation_or_company(kind):
    requests = [(real.chat(prompt), {"temperature": 0.0, "max_tokens": 32}) for prompt in real.PROMPTS]
    crowd = real.generate(requests, "fixed:4", kind)
    assert crowd == real.generate(requests, "off", kind)
    for request, text in zip(requests[::4], crowd[::4], strict=True):
        assert real.generate([request], "off", kind) == [text]
        assert real.generate([request], "fixed:7", kind) == [text]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"top_p": 0.9, "top_k": 50},
        {"min_p": 0.05, "presence_penalty": 0.5, "repetition_penalty": 1.1, "logit_bias": {198: -2.0}},
    ],
    ids=["plain", "filters", "penalties"],
)
def test_seeded_texts_do_not_depend_on_speculation_or_company(kind, extra):
    params = {"seed": 1234, "temperature": 0.8, "max_tokens": 32, **extra}
    others = [(real.chat(prompt), {"max_tokens": 24}) for prompt in real.PROMPTS[4:20]]
    prompt = real.chat(real.PROMPTS[2])
    alone = real.generate([(prompt, params)], "off", kind)[0]
    assert real.generate([(prompt, params)], "fixed:4", kind)[0] == alone
    assert real.generate([*others, (prompt, params)], "fixed:4", kind)[-1] == alone


@pytest.mark.parametrize("kind", KINDS)
def test_a_prefix_from_the_cache_leaves_the_text_alone(kind):
    from engine.params import SamplingParams
    from engine.request import Request

    prompt = real.chat("Repeat after me: " + "the quick brown fox jumps over the lazy dog. " * 6)
    params = {"temperature": 0.0, "max_tokens": 24}
    cold = real.generate([(prompt, params)], "off", kind)[0][0]
    loop, worker = real.parts(kind).loop, real.parts(kind).worker
    for name in ("first", "second"):
        active = loop.add(Request(name, prompt, SamplingParams(**params), "shared"))
        text: list[int] = []
        while loop.has_work:
            batch = loop.begin()
            for _, delta in loop.commit(batch, worker.run(batch)):
                text += delta.token_ids
        assert text == cold
    assert active.usage.cached_tokens >= len(prompt) - 17


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_scored_as_a_prompt_has_the_logprobs_that_it_was_generated_with(kind):
    """Generated in drafted blocks; scored in chunks, beside others, with its prompt in the cache."""
    from engine.params import SamplingParams
    from engine.request import Request
    from scheduler.policies import parse_policy

    loop, worker = real.parts(kind).loop, real.parts(kind).worker
    loop.speculation.policy = parse_policy("fixed:4")
    prompt = real.chat("Repeat after me: " + "the quick brown fox jumps over the lazy dog. " * 12)

    def run(*requests):
        told = {request.request_id: ([], []) for request in requests}
        for request in requests:
            loop.add(request)
        while loop.has_work:
            batch = loop.begin()
            for active, delta in loop.commit(batch, worker.run(batch)):
                generated, scored = told[active.request.request_id]
                generated += delta.logprobs
                scored += delta.prompt_logprobs
        return list(told.values())

    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=3, ignore_eos=True)
    ((generated, _),) = run(Request("generated", prompt, params, "scoring"))
    text = prompt + [each.token_id for each in generated]
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=3)
    other = Request("other", real.chat(real.PROMPTS[0]), SamplingParams(temperature=0.0, max_tokens=16))
    (_, scored), _ = run(Request("scored", text, scoring, "scoring"), other)
    assert len(scored) == len(text) - 1
    for one, same in zip(generated, scored[-24:], strict=True):
        assert (same.token_id, [token for token, _ in same.top]) == (one.token_id, [t for t, _ in one.top])
        assert same.logprob == pytest.approx(one.logprob, abs=1e-6)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_thousand_random_batches_equal_the_row_alone(kind):
    folder = real.folder()
    config, weights = ModelConfig.from_folder(folder), load_weights(folder, kind)
    rng = np.random.default_rng(9)
    words = [real.chat(prompt) for prompt in real.PROMPTS]
    texts = [np.array((words[i] * 9)[:size], dtype=np.int32) for i, size in enumerate((270, 150, 97, 48, 33))]
    alone = NativeExecutor(config, weights, 40, 1, 512)
    for threads in (1, 2):
        crowd = NativeExecutor(config, weights, 60, threads, 512)
        check_random_batches(alone, crowd, texts, 500, rng)


@pytest.mark.parametrize("kind", KINDS)
def test_features_are_as_invariant_as_logits(kind):
    config, weights = ModelConfig.from_folder(real.folder()), load_weights(real.folder(), kind)
    native = NativeExecutor(config, weights, 20, 1, 256)
    text = np.array(real.chat(real.PROMPTS[0])[:20], dtype=np.int32)
    pages = np.arange(4, dtype=np.int32)
    together = native.forward(VerificationBatch((item(text, 0, 20, pages),)), (-1, 7, 29)).features
    rows = [
        native.forward(VerificationBatch((item(text[: i + 1], i, 1, pages + 8),)), (-1, 7, 29)).features
        for i in range(20)
    ]
    assert torch.equal(together, torch.cat(rows))
