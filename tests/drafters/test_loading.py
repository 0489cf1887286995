"""A draft model for the default target, from its folder to texts; features of the target for training."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from drafters.checkpoint import save
from drafters.config import DraftConfig
from drafters.model import DraftModel
from drafters.target_tensors import TargetTensors
from drafters.training.target import Target
from engine.models.config import ModelConfig
from engine.outputs import NullObserver
from engine.params import SamplingParams
from engine.request import Request
from server.settings import Settings
from server.wiring import BadSettings, build_parts
from tests.engine import real

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    """An untrained draft model at the default model's sizes, with a vocabulary of 8192."""
    torch.manual_seed(0)
    target = ModelConfig.from_folder(real.folder())
    tensors = TargetTensors.load(real.folder(), target)
    d2t = torch.arange(0, target.vocab_size, 6)[:8192]
    config = DraftConfig.for_target(target, mask_token_id=16, rank=32, draft_vocab_size=8192)
    folder = tmp_path_factory.mktemp("draft")
    save(DraftModel(config, tensors.embedding, tensors.head[d2t], d2t), folder)
    return folder


def texts(method: str, folder, executor: str = "native") -> list[list[int]]:
    config = {"method": method} | ({"model": str(folder)} if method in ("dspark", "hybrid") else {})
    extra = {"dtype": "float32"} if executor == "torch" else {}
    parts = build_parts(
        Settings(speculative_config=config, executor=executor, num_pages=200, threads=1, **extra),
        NullObserver(),
        lambda line: None,
    )
    out: dict[str, list[int]] = {}
    for index, prompt in enumerate(real.PROMPTS[:4]):
        how = {"seed": 5} if index % 2 else {"temperature": 0.0}
        parts.loop.add(Request(str(index), real.chat(prompt), SamplingParams(max_tokens=16, **how)))
        out[str(index)] = []
    while parts.loop.has_work:
        batch = parts.loop.begin()
        for active, delta in parts.loop.commit(batch, parts.worker.run(batch)):
            out[active.request.request_id] += delta.token_ids
    parts.loop.pool.check()
    return list(out.values())


def test_texts_are_the_targets_with_a_draft_model_and_the_hybrid(draft):
    plain = texts("off", draft)
    assert texts("dspark", draft) == plain
    assert texts("hybrid", draft) == plain


def test_a_draft_model_runs_on_the_torch_executor_too(draft):
    found = texts("dspark", draft, "torch")
    assert [len(text) for text in found] == [len(text) for text in texts("off", draft, "torch")]


def test_a_draft_model_of_another_target_is_refused(draft, tmp_path):
    raw = json.loads((draft / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((draft / "model.safetensors").read_bytes())
    for change, message in (({"hidden_size": 64}, "width 64"), ({"target_layer_ids": [1, 29]}, "layers")):
        (tmp_path / "config.json").write_text(json.dumps(raw | change))
        with pytest.raises(BadSettings, match=message):
            texts("dspark", tmp_path)
    with pytest.raises(BadSettings, match=r"--speculative-config: .*neither an existing folder"):
        texts("dspark", tmp_path / "nothing")


def test_an_export_holds_everything_and_comes_back_the_same(draft, tmp_path):
    from safetensors import safe_open

    from drafters.export import main

    assert main([str(draft), "--output-dir", str(tmp_path)]) == 0
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["Qwen3DSparkModel"]
    assert (raw["draft_vocab_size"], raw["vocab_size"], raw["sliding_window"]) == (8192, 49152, 128)
    assert (tmp_path / "tokenizer.json").exists()
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        head, embedding = file.get_tensor("lm_head.weight"), file.get_tensor("embed_tokens.weight")
        ids = file.get_tensor("d2t") + torch.arange(8192)
    target = TargetTensors.load(real.folder(), ModelConfig.from_folder(real.folder()))
    assert torch.equal(embedding, target.embedding.bfloat16())
    assert torch.equal(head, target.head[ids].bfloat16())
    assert texts("dspark", tmp_path) == texts("dspark", draft)


def test_features_are_the_targets_own():
    target = Target(real.folder(), 1, 200)
    text = np.array(real.chat("Why is the sky blue?") * 5, dtype=np.int32)[:150]
    found = target.features(text, (1, 14))
    assert found.layers.shape == (150, 2 * 576)
    assert torch.allclose((found.final @ target.tensors.head.T).logsumexp(-1), found.lse, atol=0.2)
    again = target.features(text[:140], (14,))
    assert torch.equal(again.layers, found.layers[:140, 576:])
    assert torch.equal(again.lse, found.lse[:140])
