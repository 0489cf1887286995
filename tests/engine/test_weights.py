"""Tensors are streamed from safetensors files, and damage is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.models.weights import CorruptModel, load_tensors


def test_all_shards_in_stored_dtype(tmp_path: Path) -> None:
    tensors = {"a": torch.ones(3), "b": torch.zeros(2, dtype=torch.bfloat16)}
    save_file({"a": tensors["a"]}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": tensors["b"]}, tmp_path / "model-00002-of-00002.safetensors")
    loaded = dict(load_tensors(tmp_path))
    assert loaded["b"].dtype == torch.bfloat16
    assert torch.equal(loaded["a"], tensors["a"])


def test_an_index_decides_which_files_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    save_file({"a": torch.zeros(1)}, tmp_path / "other.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    assert dict(load_tensors(tmp_path)) == {"a": torch.ones(1)}
    index.write_text(json.dumps({"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}))
    with pytest.raises(CorruptModel, match=r"x\.safetensors.*'b'"):
        dict(load_tensors(tmp_path))


@pytest.mark.parametrize("name", ["missing.safetensors", "../x.safetensors"])
def test_an_index_that_names_what_is_not_there(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CorruptModel, match="not there"):
        dict(load_tensors(folder))


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}'])
def test_a_broken_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CorruptModel, match="index"):
        dict(load_tensors(tmp_path))


@pytest.mark.parametrize("keep", [0, 4, 60, -1])
def test_truncated_file(tmp_path: Path, keep: int) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(100)}, file)
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(CorruptModel, match=r"model\.safetensors"):
        dict(load_tensors(tmp_path))
    (tmp_path / "source.json").write_text("{}")  # a conversion of ours
    with pytest.raises(CorruptModel, match=f"delete {tmp_path}"):
        dict(load_tensors(tmp_path))


def test_no_weights(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        dict(load_tensors(tmp_path))
