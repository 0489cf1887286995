"""The CUDA executor, on fakes, computes what the torch executor computes, and texts are the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.batch import VerificationBatch
from engine.outputs import NullObserver
from engine.torch_executor import TorchExecutor
from tests.engine.cuda.harness import POSITIONS, Device, bounded
from tests.engine.cuda.tape import CannotCapture
from tests.engine.harness import VOCAB, Engine, babbler, fused, hf_model, tiny
from tests.engine.test_forward import item

LAYERS = (1, -1, 0)
FAMILIES = {
    "llama": {},
    "llama-tied": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 9},
    "qwen2": {"max_window_layers": 1, "use_sliding_window": True, "sliding_window": 9},
    "qwen3": {},
}


def steps(seed: int = 1):
    """A prompt in chunks beside others, then verification of three texts, then of two."""
    rng = np.random.default_rng(seed)
    a, b, c = (rng.integers(0, VOCAB, size) for size in (37, 21, 9))
    scattered = rng.permutation(40)
    pa, pb, pc = scattered[:12], scattered[16:24], scattered[12:16]
    yield [item(a, 0, 13, pa, sample=False), item(b[:16], 0, 16, pb), item(c[:4], 0, 4, pc)]
    yield [
        item(b[:17], 16, 3, pb, draft=b[17:19].tolist()),
        item(a[:30], 13, 17, pa),
        item(c[:5], 4, 4, pc, draft=c[5:8].tolist()),
    ]
    yield [
        item(b[:18], 17, 4, pb, draft=b[18:21].tolist()),
        item(a[:31], 30, 5, pa, draft=a[31:35].tolist()),
        item(c[:6], 5, 1, pc),
    ]
    yield [item(c[:7], 6, 3, pc, draft=c[7:9].tolist()), item(a[:33], 32, 1, pa)]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("attention", ["flashinfer", "sdpa"])
def test_logits_and_features_are_the_torch_executors(name, attention):
    family, changes = name.partition("-")[0], FAMILIES[name]
    device = Device(bounded(family, torch.float64, **changes), 40, 4, attention)
    reference = TorchExecutor(device.executor.model, 40, 4, torch.float64)
    device.executor.capture(12, 3, LAYERS)
    for number, batch in enumerate(map(VerificationBatch, map(tuple, steps()))):
        found, wanted = device.executor.forward(batch, LAYERS), reference.forward(batch, LAYERS)
        assert found.logits.shape == wanted.logits.shape
        assert torch.allclose(found.logits, wanted.logits, atol=1e-9)
        assert torch.allclose(found.features, wanted.features, atol=1e-9)
        replayed = max(0, number - 1) if attention == "flashinfer" else 0
        assert device.graphs.replayed == replayed, "steps of verified rows only are replayed"


def test_steps_beyond_the_graphs_run_without():
    device = Device(bounded("qwen3"), 40)
    device.executor.capture(8, 3, ())
    reference = TorchExecutor(device.executor.model, 40, 4, torch.float64)
    for batch in map(VerificationBatch, map(tuple, steps())):
        # no graph has so many rows, and with features none was recorded
        for layers in ((), LAYERS):
            found = device.executor.forward(batch, layers).logits.clone()
            assert torch.allclose(found, reference.forward(batch, layers).logits, atol=1e-9)
    assert device.graphs.replayed == 1, "the last step alone fits"


def test_more_page_ids_than_were_planned_for_run_without_a_graph():
    device = Device(bounded("qwen3"), 40)
    device.executor.capture(16, 16, ())
    device.executor._recorded.pages = 15  # ids
    reference = TorchExecutor(device.executor.model, 40, 4, torch.float64)
    for batch in map(VerificationBatch, map(tuple, steps())):
        found = device.executor.forward(batch).logits
        assert torch.allclose(found, reference.forward(batch).logits, atol=1e-9)
    assert device.graphs.replayed == 1


def test_prompt_rows_and_verified_rows_are_planned_apart():
    device = Device(bounded("llama"), 40)
    plans = []
    for eager in device.executor._eager:
        wrapper = eager.wrappers[None]
        plan = wrapper.plan

        def seen(*where, plan=plan, **how):
            plans.append(np.diff(where[0].numpy()).tolist())
            plan(*where, **how)

        wrapper.plan = seen
    for batch in steps():
        device.executor.forward(VerificationBatch(tuple(batch)))
    assert plans[:1] == [[13, 16, 4]]
    assert plans[1:3] == [[17], [3, 4]]
    assert plans[3:] == [[4, 5, 1], [3, 1]]


def test_a_model_that_looks_at_positions_is_refused():
    with pytest.raises(ValueError, match="max_positions"):
        Device(tiny("llama"))


def test_a_pool_that_moved_after_capture_is_noticed():
    device = Device(bounded("llama"), 40)
    device.executor.capture(8, 3, ())
    device.executor.pool.keys[0].set_(torch.zeros_like(device.executor.pool.keys[0]))
    batch = VerificationBatch((item([3, 4], 1, 1, [2]),))
    with pytest.raises(CannotCapture, match="moved"):
        device.executor.forward(batch)


def test_resized_pools_have_so_many_pages():
    device = Device(bounded("llama"), 4)
    device.executor.resize(9)
    assert device.executor.num_pages == 9
    assert {len(pool) for pool in (*device.executor.pool.keys, *device.executor.pool.values)} == {10}
    assert device.executor.pool.page_bytes == 2 * 2 * 4 * 2 * 8 * 8


def test_it_says_what_it_is():
    device = Device(bounded("llama"))
    device.executor.capture(8, 3, ())
    described = device.executor.describe()
    assert described["executor"] == "cuda"
    assert described["attention"] == "flashinfer"
    assert described["graphs"] == 4


def test_the_rope_table_of_a_bounded_model_ends_where_it_was_told():
    model = bounded("llama")
    assert model._table.shape[0] == POSITIONS
    other = fused(hf_model("llama", dtype=torch.float64, num_hidden_layers=2), torch.float64)
    assert torch.equal(other._table[:POSITIONS], model._table)


# ---- the whole engine

REQUESTS = {
    "greedy": ([3, 5, 7], {"temperature": 0.0}),
    "seeded": ([4, 5, 6] * 3, {"seed": 3, "top_p": 0.9, "n": 2}),
    "long": (list(range(2, 60)), {"temperature": 0.0}),  # longer than a step has rows: prefilled in chunks
    "same": (list(range(2, 60)), {"seed": 5, "top_k": 20}),  # finds the other's pages
    "penalised": ([9, 9, 8], {"temperature": 0.0, "presence_penalty": 0.5, "repetition_penalty": 1.3}),
    "biased": ([8, 9], {"seed": 9, "logit_bias": {5: 2.0}, "min_tokens": 4}),
    "sampled": ([6, 7, 8], {"logprobs": 2}),
}


def fill(engine: Engine, tokens: int = 24) -> Engine:
    for name, (prompt, params) in REQUESTS.items():
        engine.add(name, prompt, max_tokens=tokens, ignore_eos=True, **params)
    engine.run()
    return engine


SETTINGS = {
    "plain": ({}, "off", {}),
    "drafts": ({"drafts": True}, "fixed:4", {}),
    "chunks": ({"drafts": True}, "fixed:3", {"token_budget": 20}),
    "pressure": ({"drafts": True}, "fixed:4", {"num_pages": 40}),
}


@pytest.mark.parametrize("attention", ["flashinfer", "sdpa"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_texts_are_the_torch_executors(setting, attention):
    options, policy, settings = SETTINGS[setting]
    settings = dict(settings)
    pages = settings.pop("num_pages", 120)
    preempted = []

    class Watch(NullObserver):
        def preempted(self) -> None:
            preempted.append(1)

    def drafter():
        return babbler(2) if options else None

    device = Device(bounded("qwen3"), pages, 4, attention)
    engine = device.engine(drafter(), policy, capture=32, observer=Watch(), **settings)
    found = fill(engine)
    wanted = fill(Engine(bounded("qwen3"), drafter(), policy, num_pages=pages, **settings))
    assert found.texts() == wanted.texts()
    ours, theirs = found.outputs["sampled"][0].logprobs, wanted.outputs["sampled"][0].logprobs
    assert [each.token_id for each in ours] == [each.token_id for each in theirs]
    assert [each.logprob for each in ours] == pytest.approx([each.logprob for each in theirs])
    assert bool(preempted) == (setting == "pressure")
    if attention == "flashinfer":
        assert device.graphs.replayed > 5


def test_a_step_without_logprobs_makes_one_copy_to_the_host():
    device = Device(bounded("qwen3"))
    engine = device.engine(babbler(2), "fixed:4", capture=32)
    for i in range(5):
        engine.add(str(i), [3 + i, 4], max_tokens=16, ignore_eos=True, temperature=0.0 if i % 2 else 1.0)
    while engine.loop.has_work:
        before = device.stream.fetched
        if engine.step():
            assert device.stream.fetched == before + 1
