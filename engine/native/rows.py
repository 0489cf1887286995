"""Work on rows of the vocabulary in the kernels: for fp32 on the CPU, where the kernels were built.

Each function does what its namesake in torch does, row by row: a result never depends on the other rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.native import loader


def kernels_for(rows: torch.Tensor) -> ctypes.CDLL | None:
    """The library, if it works on such rows [n, V]."""
    if rows.dtype != torch.float32 or rows.device.type != "cpu" or not rows.is_contiguous():
        return None
    return loader.native_library()


def _chosen(rows: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.asarray(rows, dtype=np.int64)


def peaks(
    library: ctypes.CDLL, logits: torch.Tensor, rows: Sequence[int]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Argmax (lowest id) and maximum of chosen rows; the maximum of a row that holds a NaN is NaN."""
    chosen = _chosen(rows)
    index, top = np.empty(len(chosen), np.int64), np.empty(len(chosen), np.float32)
    library.dspark_peaks(
        logits.data_ptr(),
        chosen.ctypes.data,
        len(chosen),
        logits.shape[-1],
        index.ctypes.data,
        top.ctypes.data,
    )
    return index, top


def softmax(
    library: ctypes.CDLL, logits: torch.Tensor, rows: Sequence[int], temperatures: Sequence[float]
) -> torch.Tensor:
    """softmax(logits[rows] / temperature) -> [n, V]. What is below e^-87 of the likeliest is 0."""
    chosen, heat = _chosen(rows), np.asarray(temperatures, dtype=np.float32)
    out = torch.empty(len(chosen), logits.shape[-1])
    library.dspark_softmax(
        logits.data_ptr(),
        chosen.ctypes.data,
        len(chosen),
        logits.shape[-1],
        heat.ctypes.data,
        out.data_ptr(),
    )
    return out


def filter_rows(
    library: ctypes.CDLL,
    p: torch.Tensor,
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
) -> None:
    """Min-p, top-k (0: off), top-p, then normalise; in place."""
    k, nucleus, floor = np.asarray(top_k, np.int32), np.asarray(top_p), np.asarray(min_p)
    library.dspark_filter(
        p.data_ptr(), p.shape[0], p.shape[1], k.ctypes.data, nucleus.ctypes.data, floor.ctypes.data
    )


def draw(
    library: ctypes.CDLL,
    p: torch.Tensor,
    rows: Sequence[int],
    u: Sequence[float] | npt.NDArray[np.float64],
    laws: Sequence[torch.Tensor | None],
    tokens: Sequence[int],
) -> list[int]:
    """Draw from max(p - q, 0) of chosen rows; q is laws[i] [V], or one-hot at tokens[i], or 0 (None and -1)."""
    chosen, uniform = _chosen(rows), np.asarray(u, dtype=np.float64)
    one_hot, out = np.asarray(tokens, dtype=np.int64), np.empty(len(chosen), np.int64)
    pointers = np.array([0 if law is None else law.data_ptr() for law in laws], dtype=np.uintp)
    library.dspark_draw(
        p.data_ptr(),
        chosen.ctypes.data,
        len(chosen),
        p.shape[-1],
        uniform.ctypes.data,
        pointers.ctypes.data,
        one_hot.ctypes.data,
        out.ctypes.data,
    )
    drawn: list[int] = out.tolist()
    return drawn


def coupled_argmax(library: ctypes.CDLL, p: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """argmax(log p + G) of each row. keys [n, 2] int32. Returns [n] int64."""
    keys = keys.contiguous()
    out = torch.empty(p.shape[0], dtype=torch.int64)
    library.dspark_coupled_argmax(p.data_ptr(), p.shape[0], p.shape[1], keys.data_ptr(), out.data_ptr())
    return out


def philox(
    library: ctypes.CDLL, counters: npt.NDArray[np.uint32], keys: npt.NDArray[np.uint32]
) -> npt.NDArray[np.uint32]:
    """Philox4x32-10. counters [n, 4], keys [n, 2] -> [n, 4]."""
    counters, keys = np.ascontiguousarray(counters), np.ascontiguousarray(keys)
    out = np.empty_like(counters)
    library.dspark_philox(counters.ctypes.data, keys.ctypes.data, len(counters), out.ctypes.data)
    return out
