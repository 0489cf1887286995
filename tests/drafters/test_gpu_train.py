"""The GPU's training run at toy size on the CPU: pack, carry, run, bring back."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from deploy.gpu import train
from deploy.gpu.answer import answer
from deploy.gpu.parcel import batches, dequantise, join, split
from drafters.training.corpus import Corpus
from tests.engine.harness import VOCAB, hf_model

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_mean_what_the_library_says(kind):
    values = np.random.default_rng(0).normal(size=(5, 96)).astype(np.float32)
    form = gguf.GGMLQuantizationType[kind]
    rows = gguf.quantize(values, form)
    ours = dequantise(kind, torch.from_numpy(rows))
    assert np.array_equal(ours.numpy(), gguf.dequantize(rows, form))


def test_other_blocks_are_refused():
    with pytest.raises(ValueError, match="Q6_K"):
        dequantise("Q6_K", torch.zeros(1, 210, dtype=torch.uint8))


def test_pieces_come_together_and_a_lost_one_is_missed(tmp_path):
    data = bytes(range(256)) * 10
    files = split(data, tmp_path / "a", "x", 1000)
    assert [file.stat().st_size for file in files] == [1000, 1000, 560]
    (tmp_path / "b").mkdir()
    files[1].rename(tmp_path / "b" / files[1].name)
    assert join([tmp_path / "a", tmp_path / "b"], "x") == data
    with pytest.raises(FileNotFoundError, match=r"\[0, 2\]"):
        join([tmp_path / "a"], "x")


def test_batches_hold_everything_once_and_stay_small():
    lengths = np.random.default_rng(0).integers(5, 60, 101)
    groups = list(batches(lengths, 300, 8))
    assert sorted(np.concatenate(groups).tolist()) == list(range(101))
    assert all(len(group) <= 8 and lengths[group].max() * len(group) <= 300 for group in groups)


def test_greedy_answers_are_those_of_generate_whatever_their_batch():
    model = hf_model("llama", initializer_range=0.3).eval()
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, VOCAB, size) for size in (4, 9, 17)]
    how = {"max_tokens": 12, "seed": 0, "deadline": np.inf, "progress": lambda line: None}
    found = answer(model, prompts, np.zeros(3), stop=[], **how)
    for index, prompt in enumerate(prompts):
        ids = torch.from_numpy(prompt)[None]
        wanted = model.generate(ids, do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0)
        assert found[index].tolist() == wanted[0, len(prompt) :].tolist()


def test_an_answer_ends_at_its_stop_token():
    model = hf_model("llama", initializer_range=0.3).eval()
    prompts = [np.array([5, 6, 7]), np.array([9, 3, 11, 30])]
    how = {"max_tokens": 40, "seed": 3, "deadline": np.inf, "progress": lambda line: None}
    free = answer(model, prompts, np.ones(2), stop=[], **how)
    stop = int(free[0][10])
    cut = answer(model, prompts, np.ones(2), stop=[stop], **how)
    place = free[0].tolist().index(stop)
    assert cut[0].tolist() == free[0][: place + 1].tolist()


@pytest.fixture
def parcel(tmp_path) -> Path:
    """A tiny model's bf16 blocks, prompts for it, and answers that exist already."""
    model = hf_model("llama", initializer_range=0.3)
    rows, types = {}, {}
    for name, value in model.state_dict().items():
        if value.ndim == 1:
            rows[name], types[name] = value.numpy(), "F32"
        else:
            rows[name], types[name] = value.bfloat16().view(torch.uint8).numpy(), "BF16"
    save_file(rows, tmp_path / "blocks.bin", metadata={"types": json.dumps(types)})
    (tmp_path / "config.json").write_text(json.dumps(model.config.to_dict()))
    rng = np.random.default_rng(0)
    np.savez(
        tmp_path / "answers.npz",
        ids=rng.integers(0, VOCAB, 40 * 24).astype(np.uint16),
        length=np.full(40, 24, np.int32),
        prompt_length=np.full(40, 6, np.int32),
        temperature=np.ones(40, np.float32),
        domain=np.array(["math"] * 40),
    )
    prompts = [(rng.integers(3, VOCAB, 8).tolist(), f"p{i}", "code") for i in range(12)]
    train.pack(
        tmp_path / "pieces", tmp_path / "blocks.bin", tmp_path / "config.json", prompts,
        [tmp_path / "answers.npz"], [2],
    )  # fmt: skip
    return tmp_path


_TOY = {"texts": 2, "anchors": 4, "block_size": 3, "least_slots": 2, "rank": 4, "num_layers": 1}


def test_a_whole_run_needs_little_and_brings_a_draft_model_back(parcel):
    """In a process of its own that finds nothing but what a machine with torch and transformers has."""
    guard = (
        "import sys\n"
        "class Bare:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'fastapi', 'pydantic', 'gguf', 'prometheus_client'}:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Bare())\n"
        "from deploy.gpu.train import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    recipe = json.dumps({**_TOY, "draft_vocab": 32, "window": 8, "mask_token_id": 1})
    command = [
        sys.executable, "-c", guard, "run", *map(str, sorted((parcel / "pieces").iterdir())),
        "--out", str(parcel / "out"), "--work", str(parcel / "work"), "--minutes", "0.6",
        "--device", "cpu", "--max-tokens", "16", "--save-every", "4", "--recipe", recipe,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    files = sorted(file.name for file in (parcel / "out").iterdir())
    assert {"answers.npz", "config.json", "draft.0", "metrics.csv", "recipe.json"} <= set(files)
    assert len(files) <= 8
    fresh = Corpus.load(parcel / "out" / "answers.npz")
    assert len(fresh) == 12
    assert train.main(["join", str(parcel / "out"), str(parcel / "draft")]) == 0
    from drafters.checkpoint import load

    embedding = hf_model("llama", initializer_range=0.3).get_input_embeddings().weight.detach()
    model = load(parcel / "draft", embedding, embedding)
    assert model.config.draft_vocab_size == 32
    steps = json.loads((parcel / "draft" / "recipe.json").read_text())["steps"]
    last = (parcel / "draft" / "metrics.csv").read_text().splitlines()[-1].split(",")
    assert int(last[0]) > 5
    assert int(last[0]) <= steps
