"""Host arrays on their way to the device: pinned buffers that take turns, and are never rewritten too early.

A copy from pinned memory is only queued when the call returns. Whoever writes to that memory again before the
copy was executed sends other data than it meant. So memory is handed out only for a turn, each turn ends with
a fence, and a buffer's next turn begins by waiting for it. With two buffers that wait is nearly always over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.cuda.stream import Fence, Stream

Array = npt.NDArray[Any]

_ALIGNED = 16  # bytes; enough for every type, and what FlashInfer asks of its buffers


def packed(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Offsets of aligned pieces of so many bytes, and the whole."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNED) * _ALIGNED
    return offsets, end


class Staging:
    """Two pinned buffers of `size` bytes at first; they grow with what goes through them."""

    def __init__(self, stream: Stream, size: int = 1 << 16) -> None:
        self.stream = stream
        self._buffers = [stream.pinned(size), stream.pinned(size)]
        self._fences: list[Fence | None] = [None, None]
        self._outgrown: list[list[torch.Tensor]] = [[], []]
        self._next = 0

    @contextmanager
    def turn(self) -> Iterator[Writer]:
        """What is written within goes over; whatever copies from it must be queued before it ends."""
        index, self._next = self._next, 1 - self._next
        fence = self._fences[index]
        if fence is not None:
            fence.wait()
        self._outgrown[index].clear()
        try:
            yield Writer(self, index)
        finally:
            self._fences[index] = self.stream.fence()

    def _grown(self, index: int, size: int) -> torch.Tensor:
        """A larger buffer for this turn; the old one lives on until its copies are done."""
        self._outgrown[index].append(self._buffers[index])
        self._buffers[index] = self.stream.pinned(max(size, 2 * len(self._buffers[index])))
        return self._buffers[index]


class Writer:
    """One turn of a staging buffer."""

    def __init__(self, staging: Staging, index: int) -> None:
        self._staging, self._index = staging, index
        self._buffer, self._used = staging._buffers[index], 0

    def host(self, array: Array) -> torch.Tensor:
        """A copy in pinned memory, of the same type, for this turn."""
        return self._write([array])[1][0]

    def device(self, *arrays: Array) -> list[torch.Tensor]:
        """Copies on the device, by one transfer."""
        source, pieces = self._write(arrays)
        target = torch.empty(len(source), dtype=torch.uint8, device=self._staging.stream.device)
        self._staging.stream.copy(target, source)
        offsets, _ = packed([array.nbytes for array in arrays])
        return [
            target[offset : offset + array.nbytes].view(piece.dtype).view(piece.shape)
            for offset, array, piece in zip(offsets, arrays, pieces, strict=True)
        ]

    def into(self, target: torch.Tensor, arrays: Sequence[Array]) -> None:
        """The same, into memory that stays: [bytes] uint8, laid out as `packed` says."""
        source, _ = self._write(arrays)
        self._staging.stream.copy(target[: len(source)], source)

    def _write(self, arrays: Sequence[Array]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Copies in the buffer: the bytes of all, and each with its type."""
        offsets, size = packed([array.nbytes for array in arrays])
        if self._used + size > len(self._buffer):
            self._buffer, self._used = self._staging._grown(self._index, size), 0
        whole = self._buffer[self._used : self._used + size]
        self._used += size
        pieces = []
        for offset, array in zip(offsets, arrays, strict=True):
            source = torch.from_numpy(np.ascontiguousarray(array))
            piece = whole[offset : offset + array.nbytes].view(source.dtype).view(source.shape)
            piece.copy_(source)
            pieces.append(piece)
        return whole, pieces


class Inputs:
    """Arrays at fixed addresses on the device, which a graph reads; one transfer fills them all.

    `fields` give each its shape and type, in the order of the transfer.
    """

    def __init__(
        self, device: torch.device, fields: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> None:
        sizes = [dtype.itemsize * int(np.prod(shape)) for shape, dtype in fields.values()]
        offsets, size = packed(sizes)
        self._memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self.fields = {
            name: self._memory[offset : offset + length].view(dtype).view(shape)
            for (name, (shape, dtype)), offset, length in zip(fields.items(), offsets, sizes, strict=True)
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.fields[name]

    def fill(self, writer: Writer, arrays: Mapping[str, Array]) -> None:
        """Queue the transfer of all arrays. Raises ValueError for a shape or type that is another."""
        for name, target in self.fields.items():
            source = torch.from_numpy(arrays[name])
            if source.shape != target.shape or source.dtype != target.dtype:
                raise ValueError(
                    f"{name}: {source.dtype} {tuple(source.shape)} instead of "
                    f"{target.dtype} {tuple(target.shape)}"
                )
        writer.into(self._memory, [arrays[name] for name in self.fields])
