"""A model's tensors and its safetensors files: streaming them from there, writing them there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open


class CorruptModel(ValueError):
    """A model file is truncated, damaged or missing from its set; the message names the file."""


def load_tensors(
    folder: Path, device: torch.device | str = "cpu", wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of every wanted tensor in `folder`, shard by shard, on a device as it is stored.

    Files are mapped into memory, so that only the tensor at hand is resident on the host. Raises
    FileNotFoundError when the folder holds no safetensors file and CorruptModel when a file cannot be read in
    full.
    """
    for path, expected in _shards(Path(folder)):
        try:
            with safe_open(path, framework="pt", device=str(device)) as shard:
                names = list(shard.keys())
                missing = expected.difference(names)
                if missing:
                    raise CorruptModel(f"{path}: lacks the tensor {min(missing)!r} that the index promises")
                for name in filter(wanted, names):
                    yield name, shard.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CorruptModel(f"{path}: truncated or damaged ({error}); {_remedy(path)}") from error


def _remedy(path: Path) -> str:
    converted = (path.parent / "source.json").is_file()
    return f"delete {path.parent} and it is made anew" if converted else "fetch the model again"


def save_arrays(arrays: Mapping[str, npt.NDArray[Any]], path: Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file. Raises OSError for a full disk, as any other writing does."""
    from safetensors.numpy import save_file

    try:
        save_file(dict(arrays), path, metadata=metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise OSError(f"{path}: {error}") from error
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def _shards(folder: Path) -> list[tuple[Path, frozenset[str]]]:
    """The files to read, each with the tensor names that an index file promises in it (may be empty)."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"{folder} holds no *.safetensors file")
        return [(file, frozenset()) for file in files]
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        by_file: dict[str, set[str]] = {}
        for name, file_name in weight_map.items():
            by_file.setdefault(file_name, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptModel(f"{index}: not a safetensors index ({error})") from error
    shards = []
    for file_name, names in sorted(by_file.items()):
        path = folder / file_name
        # An index comes with the model, so it must not be able to point outside the model's folder.
        if Path(file_name).name != file_name or not path.is_file():
            raise CorruptModel(f"{path}: named by {index.name} but not there; the download is incomplete")
        shards.append((path, frozenset(names)))
    return shards
