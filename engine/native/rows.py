"""Work on rows of the vocabulary in the kernels: for fp32 on the CPU, where the kernels were built.

Results never depend on the other rows. Arguments go over as ctypes arrays, because this code runs between two
forward passes, each of which has emptied the caches: the fewer different things it touches, the better.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.native import loader
from engine.outputs import TokenLogprob

KINDS = {"greedy": 0, "rejection": 1, "coupled": 2}


class Choice(ctypes.Structure):
    """One row's decision, as engine/native/src/rows.cpp declares it."""

    _fields_ = (
        ("row", ctypes.c_int64),
        ("draft", ctypes.c_int64),
        ("law", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("law_size", ctypes.c_int64),
        ("accept_u", ctypes.c_double),
        ("final_u", ctypes.c_double),
        ("top_p", ctypes.c_double),
        ("min_p", ctypes.c_double),
        ("temperature", ctypes.c_float),
        ("top_k", ctypes.c_int32),
        ("kind", ctypes.c_int32),
        ("key0", ctypes.c_uint32),
        ("key1", ctypes.c_uint32),
        ("accepted", ctypes.c_int32),
        ("token", ctypes.c_int64),
    )


def kernels_for(rows: torch.Tensor) -> ctypes.CDLL | None:
    """The library, if it works on such rows [n, V]."""
    if rows.dtype != torch.float32 or rows.device.type != "cpu" or not rows.is_contiguous():
        return None
    return loader.native_library()


def _integers(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * len(values))(*values)


def decide(
    library: ctypes.CDLL, logits: torch.Tensor, choices: ctypes.Array[Choice], sizes: Sequence[int]
) -> None:
    """Fill in `token` and `accepted` of choices over logits [., V], which are runs of these sizes.

    A run is decided up to its first choice that is not its draft; see `engine.decision`.
    """
    assert sum(sizes) == len(choices)
    runs = (ctypes.c_int32 * len(sizes))(*sizes)
    library.dspark_decide(logits.data_ptr(), logits.shape[-1], choices, runs, len(sizes))


def logprobs(
    library: ctypes.CDLL,
    rows: Sequence[torch.Tensor],
    tokens: Sequence[int],
    tops: Sequence[int],
    ranked: bool,
) -> list[TokenLogprob]:
    """As `engine.logprobs.logprobs` says; rows [V] lie anywhere. Of equal ones the lowest ids come first."""
    n, vocab, width = len(rows), len(rows[0]), max(tops)
    # The kernels do not look.
    assert width <= vocab
    assert len(tokens) == len(tops) == n
    assert min(tokens) >= 0
    assert max(tokens) < vocab
    assert all(len(row) == vocab and row.stride(0) == 1 for row in rows)
    own, ranks = (ctypes.c_double * n)(), (ctypes.c_int64 * n)()
    ids, values = (ctypes.c_int64 * (n * width))(), (ctypes.c_double * (n * width))()
    library.dspark_logprobs(
        (ctypes.c_void_p * n)(*[row.data_ptr() for row in rows]),
        _integers(tokens),
        (ctypes.c_int32 * n)(*tops),
        *(n, vocab, width, own, ranks if ranked else None, ids, values),
    )
    out = []
    for i, (token, top) in enumerate(zip(tokens, tops, strict=True)):
        mine = slice(i * width, i * width + top)
        best = tuple(zip(ids[mine], values[mine], strict=True))
        out.append(TokenLogprob(token, own[i], best, ranks[i] if ranked else None))
    return out


def softmax(
    library: ctypes.CDLL, logits: torch.Tensor, rows: Sequence[int], temperatures: Sequence[float]
) -> torch.Tensor:
    """softmax(logits[rows] / temperature) -> [n, V]. What is below e^-87 of the likeliest is 0."""
    n = len(rows)
    out = torch.empty(n, logits.shape[-1])
    heat = (ctypes.c_float * n)(*temperatures)
    library.dspark_softmax(logits.data_ptr(), _integers(rows), n, logits.shape[-1], heat, out.data_ptr())
    return out


def filter_rows(
    library: ctypes.CDLL,
    p: torch.Tensor,
    top_k: Sequence[int],
    top_p: Sequence[float],
    min_p: Sequence[float],
) -> None:
    """Min-p, top-k (0: off), top-p, then normalise; in place."""
    n = p.shape[0]
    k, nucleus, floor = (
        (ctypes.c_int32 * n)(*top_k),
        (ctypes.c_double * n)(*top_p),
        (ctypes.c_double * n)(*min_p),
    )
    library.dspark_filter(p.data_ptr(), n, p.shape[1], k, nucleus, floor)


def penalise(
    library: ctypes.CDLL, row: torch.Tensor, counts: torch.Tensor, frequency: float, presence: float
) -> None:
    """row [V] -= frequency * counts + presence * (counts > 0), in place; counts int32 [V]."""
    assert len(counts) == len(row)  # the kernels do not look
    library.dspark_penalise(row.data_ptr(), row.shape[0], counts.data_ptr(), frequency, presence)


def repeat(library: ctypes.CDLL, row: torch.Tensor, seen: torch.Tensor, penalty: float) -> None:
    """Repetition penalty on row [V], in place, where `seen` (bool [V])."""
    assert len(seen) == len(row)
    library.dspark_repeat(row.data_ptr(), row.shape[0], seen.data_ptr(), penalty)


def allow(library: ctypes.CDLL, row: torch.Tensor, bits: npt.NDArray[np.uint8]) -> None:
    """-inf on row [V], in place, for all tokens without their bit in `bits` [V / 8, rounded up]."""
    assert 8 * len(bits) >= len(row)
    library.dspark_allow(row.data_ptr(), row.shape[0], bits.ctypes.data)


def coupled_argmax(library: ctypes.CDLL, p: torch.Tensor, keys: Sequence[tuple[int, int]]) -> list[int]:
    """argmax(log p + G) of each row [n, V] under its key."""
    n = len(keys)
    words = (ctypes.c_uint32 * (2 * n))(*[word for key in keys for word in key])
    out = (ctypes.c_int64 * n)()
    library.dspark_coupled_argmax(p.data_ptr(), n, p.shape[1], words, out)
    return list(out)


def uniforms(
    library: ctypes.CDLL,
    streams: Sequence[tuple[int, int, int, int]],
    positions: Sequence[int],
    rounds: Sequence[int],
    slots: int,
    purpose: int,
) -> list[list[float]]:
    """The very numbers of `engine.noise.uniforms`."""
    n = len(streams)
    words = _integers([word for stream in streams for word in stream])
    out = (ctypes.c_double * (n * slots))()
    library.dspark_uniforms(words, _integers(positions), _integers(rounds), n, slots, purpose, out)
    return [out[i * slots : (i + 1) * slots] for i in range(n)]


def row_keys(
    library: ctypes.CDLL, seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]
) -> list[tuple[int, int]]:
    """The very keys of `engine.noise.row_keys`, as unsigned words."""
    n = len(seeds)
    out = (ctypes.c_uint32 * (2 * n))()
    library.dspark_row_keys(_integers(seeds), _integers(choices), _integers(positions), n, out)
    return [(out[2 * i], out[2 * i + 1]) for i in range(n)]
