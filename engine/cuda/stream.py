"""What the engine asks of a device's queue of work: copies that do not wait, and fences to wait at."""

from __future__ import annotations

from typing import Protocol

import torch


class Fence(Protocol):
    """A place in the queue."""

    def wait(self) -> None:
        """Until everything that was queued before it has been executed."""


class Stream(Protocol):
    """One queue; everything of an engine goes through it in order."""

    device: torch.device

    def pinned(self, size: int) -> torch.Tensor:
        """Host memory [size] uint8 from which the device copies on its own."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy to the device. `source` must not change before a fence behind it was waited for."""

    def fence(self) -> Fence:
        """Here."""

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host, when everything before it has been executed: the one thing that waits."""


class CudaStream:
    """The current stream of a CUDA device."""

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self.device = torch.device(device)

    def pinned(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def fence(self) -> Fence:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return _CudaFence(event)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()


class _CudaFence:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()
