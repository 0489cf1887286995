"""Logits of ragged, paged, chunked batches equal transformers' on the whole text."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.batch import BatchItem, DraftBlock, VerificationBatch
from engine.params import SamplingParams
from engine.sampling import SamplingState
from engine.torch_executor import TorchExecutor
from tests.engine.harness import VOCAB, fused, hf_model

FAMILIES = {
    "llama": {},
    "llama-scaled": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "llama-tied": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 9},
    "qwen2": {},
    "qwen3": {},
}


def item(history, start, count, pages, draft=(), sample=True):
    state = SamplingState(SamplingParams(), VOCAB, frozenset())
    block = DraftBlock(tuple(draft)) if draft else None
    return BatchItem(
        0,
        np.asarray(history, dtype=np.int32),
        start,
        count,
        np.asarray(pages, dtype=np.int32),
        sample,
        state,
        1 << 20,
        0,
        block,
        len(draft),
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_ragged_paged_chunked_logits_equal_transformers(name):
    reference = hf_model(name.partition("-")[0], **FAMILIES[name])
    model = fused(reference)
    executor = TorchExecutor(model, num_pages=40, page_size=4)
    rng = np.random.default_rng(1)
    a, b, c = (rng.integers(0, VOCAB, size) for size in (37, 21, 5))
    scattered = rng.permutation(40)
    pages_a, pages_b, pages_c = scattered[:12], scattered[16:24], scattered[12:16]
    expected = {
        key: reference(torch.as_tensor(text)[None]).logits[0] for key, text in (("a", a), ("b", b), ("c", c))
    }

    # chunks of a and b; then the rest of a, a verification of b with drafts, and c from its start
    executor.forward(
        VerificationBatch((item(a, 0, 13, pages_a, sample=False), item(b, 0, 16, pages_b, sample=False)))
    )
    second = executor.forward(
        VerificationBatch(
            (
                item(a, 13, 24, pages_a),
                item(b[:17], 16, 5, pages_b, draft=b[17:21].tolist()),
                item(c, 0, 5, pages_c),
            )
        )
    )
    wanted = torch.cat((expected["a"][-1:], expected["b"][16:21], expected["c"][-1:]))
    assert (second.logits - wanted).abs().max() < 1e-4


def test_features_are_raw_layer_outputs_in_the_order_asked():
    reference = hf_model("qwen3")
    executor = TorchExecutor(fused(reference), num_pages=8, page_size=4)
    text = np.arange(11)
    output = executor.forward(VerificationBatch((item(text, 0, 11, np.arange(3)),)), (1, -1, 0))
    hidden = reference(torch.as_tensor(text)[None], output_hidden_states=True).hidden_states
    wanted = torch.cat([hidden[2][0], hidden[0][0], hidden[1][0]], dim=-1)
    assert output.features is not None
    assert (output.features - wanted).abs().max() < 1e-4
