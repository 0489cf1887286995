"""Files in pieces small enough to travel, and a model's weight blocks without the GGUF library."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch


def split(data: bytes, folder: Path, name: str, most: int) -> list[Path]:
    """Write `data` as folder/name.0, .1, ... of at most `most` bytes each."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for number, first in enumerate(range(0, len(data), most)):
        files.append(folder / f"{name}.{number}")
        files[-1].write_bytes(data[first : first + most])
    return files


def join(folders: list[Path], name: str) -> bytes:
    """What `split` was given, from pieces that may lie in several folders. Raises FileNotFoundError."""
    found = {
        int(f.suffix[1:]): f for folder in folders for f in folder.glob(f"{name}.*") if f.suffix[1:].isdigit()
    }
    if not found or set(found) != set(range(len(found))):
        raise FileNotFoundError(f"{name}: pieces {sorted(found)} of it are there")
    return b"".join(found[number].read_bytes() for number in sorted(found))


def unpack(blocks: Path, config: Path, folder: Path) -> None:
    """A model folder in bf16 from its quantised blocks (safetensors of bytes) and its config.json."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    with safe_open(blocks, framework="numpy") as file:
        for name, kind in json.loads(file.metadata()["types"]).items():
            tensors[name] = dequantise(kind, torch.from_numpy(file.get_tensor(name))).to(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_bytes(config.read_bytes())


def dequantise(kind: str, rows: torch.Tensor) -> torch.Tensor:
    """Values [n, cols] in fp32 of rows of GGUF blocks, uint8 [n, bytes]. Raises ValueError for others."""
    if kind in ("F32", "F16"):
        return rows.float()
    if kind == "BF16":
        return rows.contiguous().view(torch.bfloat16).float()
    if kind not in ("Q4_0", "Q4_1", "Q8_0"):
        raise ValueError(f"{kind} blocks are not read here")
    size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
    blocks = rows.reshape(len(rows), -1, size)
    scale = _half(blocks[..., :2])
    if kind == "Q8_0":
        values = blocks[..., 2:].contiguous().view(torch.int8).float() * scale
    else:
        packed = blocks[..., size - 16 :]
        numbers = torch.cat((packed & 15, packed >> 4), -1).float()  # low halves first
        values = (numbers - 8.0) * scale if kind == "Q4_0" else numbers * scale + _half(blocks[..., 2:4])
    return values.flatten(1)


def _half(pair: torch.Tensor) -> torch.Tensor:
    return pair.contiguous().view(torch.float16).float()


def batches(lengths: np.ndarray, tokens: int, most: int) -> Iterator[np.ndarray]:
    """Indices in groups of similar length: at most `tokens` padded tokens and `most` rows each."""
    order = np.argsort(-lengths, kind="stable")
    first = 0
    while first < len(order):
        count = max(1, min(most, tokens // int(lengths[order[first]])))
        yield order[first : first + count]
        first += count
