"""`dspark data features` and `dspark train` on a tiny model's folder, as one would type them."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from drafters.training.cli import main
from tests.engine.harness import VOCAB, hf_model

SHORT = (
    *("--steps", "8", "--rank", "4", "--num-layers", "1", "--block-size", "3", "--window", "8"),
    *("--draft-vocab", "32", "--mask-token-id", "1", "--anchors", "4", "--threads", "1"),
)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("world")
    hf_model("llama", initializer_range=0.3).save_pretrained(folder / "model")
    rng = np.random.default_rng(0)
    np.savez(
        folder / "answers.npz",
        ids=rng.integers(0, VOCAB, 30 * 20).astype(np.uint16),
        length=np.full(30, 20, np.int32),
        prompt_length=np.full(30, 5, np.int32),
        temperature=np.ones(30, np.float32),
    )
    return folder


def sources(world: Path) -> list[str]:
    return [
        *("--model", str(world / "model"), "--answers", str(world / "answers.npz")),
        *("--features", str(world / "features")),
    ]


def steps(run: Path) -> list[int]:
    with (run / "metrics.csv").open() as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def test_features_then_training_then_a_longer_run(world, tmp_path, capsys):
    assert main(["data", "features", *sources(world), "--threads", "1"]) == 0
    assert "30/30 texts" in capsys.readouterr().out
    run = tmp_path / "run"
    command = ["train", *sources(world), "--output-dir", str(run), *SHORT]
    assert main(command) == 0
    assert steps(run) == [8]
    recipe = json.loads((run / "recipe.json").read_text())
    assert (recipe["steps"], recipe["rank"], recipe["draft_vocab"]) == (8, 4, 32)
    assert (run / "draft" / "model.safetensors").exists()
    assert main(command) == 0  # nothing left to do
    assert steps(run) == [8]


def test_a_run_goes_on_by_its_own_recipe(world, tmp_path):
    run = tmp_path / "run"
    assert main(["data", "features", *sources(world), "--threads", "1"]) == 0
    assert main(["train", *sources(world), "--output-dir", str(run), *SHORT, "--hours", "0"]) == 0
    assert steps(run) == [1]  # stopped at once
    again = ["train", *sources(world), "--output-dir", str(run), "--threads", "1"]
    assert main([*again, "--rank", "8"]) == 1  # another recipe
    assert main([*again, "--steps", "9"]) == 0
    assert steps(run) == [1, 9]
    recipe = json.loads((run / "recipe.json").read_text())
    assert (recipe["rank"], recipe["steps"]) == (4, 9)


def test_live_features_need_no_cache(world, tmp_path):
    command = ["train", *sources(world)[:4], "--live", "--output-dir", str(tmp_path), *SHORT]
    assert main([*command, "--feature-layers", "0,1"]) == 0
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["target_layer_ids"] == [0, 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--answers", "/no/such"], "/no/such"),
        (["--rank", "four"], "--rank: 'four'"),
        (["--head", "magic"], "magic"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(world, tmp_path, capsys, change, words):
    command = ["train", *sources(world), "--output-dir", str(tmp_path), *SHORT, *change]
    assert main(command) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_training_without_a_word_about_features_says_what_to_do(world, tmp_path, capsys):
    assert main(["train", *sources(world)[:4], "--output-dir", str(tmp_path), *SHORT]) == 1
    assert "--features" in capsys.readouterr().err
