"""Brings a checkpoint's tensors into the kernels: bf16, or a GGUF file's own blocks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from engine.models.blocks import load_blocks
from engine.models.weights import load_tensors

log = logging.getLogger("dspark.engine")

#: codes of engine/native/src/model.h
FORMATS = {"BF16": 0, "Q4_0": 1, "Q4_1": 2, "Q8_0": 3}


class UnsupportedWeights(ValueError):
    """The checkpoint holds a weight format that the kernels do not read."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A matrix [count, cols] as rows of bytes in its checkpoint form."""

    format: str
    data: npt.NDArray[np.uint8]
    cols: int

    @property
    def count(self) -> int:
        return int(self.data.shape[0])


Weights = dict[str, Rows | npt.NDArray[np.float32]]


def load_weights(folder: Path, quantization: str) -> Weights:
    """Every tensor under its Hugging Face name less "model.": matrices as Rows, vectors as float32.

    quantization "bf16" rounds the values to bf16; "gguf" takes the blocks of the GGUF file behind the
    folder as they are; "auto" does so where there is such a file in formats that the kernels read. Raises
    UnsupportedWeights, FileNotFoundError or CorruptModel.
    """
    if quantization == "auto":
        try:
            return dict(_blocks(folder))
        except UnsupportedWeights as error:
            log.info("%s: weights are served as bf16: %s", folder.name, error)
        except FileNotFoundError:
            pass
        return as_bf16(load_tensors(folder))
    return dict(_blocks(folder)) if quantization == "gguf" else as_bf16(load_tensors(folder))


def as_bf16(tensors: Iterable[tuple[str, torch.Tensor]]) -> Weights:
    """A checkpoint's tensors, matrices rounded to bf16."""
    weights: Weights = {}
    for name, tensor in tensors:
        if tensor.ndim == 1:
            weights[_short(name)] = tensor.float().numpy()
        else:
            bits = tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy()
            weights[_short(name)] = Rows("BF16", bits.view(np.uint8), tensor.shape[1])
    return weights


def in_q4(weights: Weights) -> Weights:
    """The same with larger matrices in Q4_1 blocks, where their rows are whole blocks of 32."""
    return {
        name: _in_q4(entry) if isinstance(entry, Rows) and entry.cols % 32 == 0 else entry
        for name, entry in weights.items()
    }


def _in_q4(rows: Rows) -> Rows:
    import gguf

    if rows.format.startswith("Q4"):
        return rows
    kinds = gguf.GGMLQuantizationType
    values = gguf.dequantize(np.ascontiguousarray(rows.data), kinds[rows.format])
    return Rows("Q4_1", gguf.quantize(values, kinds.Q4_1), rows.cols)


def _short(name: str) -> str:
    return name.removeprefix("model.")


def _blocks(folder: Path) -> Iterator[tuple[str, Rows | npt.NDArray[np.float32]]]:
    for name, kind, values in load_blocks(folder):
        if values.ndim == 1 and kind == "F32":
            yield _short(name), values.astype(np.float32, copy=False)
        elif kind in ("F32", "F16"):  # a small matrix that the file keeps in full
            bits = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy()
            yield _short(name), Rows("BF16", bits.view(np.uint8), values.shape[1])
        elif kind == "BF16":
            yield _short(name), Rows("BF16", values.view(np.uint8), values.shape[1] // 2)
        elif kind in FORMATS:
            size = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}[kind]
            yield _short(name), Rows(kind, values.view(np.uint8), values.shape[1] // size * 32)
        else:
            raise UnsupportedWeights(f"the native executor does not read {kind} weights ({name})")
