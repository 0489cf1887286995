"""Several processes training one model (torchrun): which one this is, and sums over all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist


class Ranks:
    """One process, unless torchrun's environment says otherwise. `first` is the one that reports."""

    def __init__(self, device: torch.device) -> None:
        self.size, self.rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
        if self.size > 1 and not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """As one vector, so that it is one exchange."""
        if self.size == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        flat = self.sum(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, part in zip(gradients, torch.split(flat, [g.numel() for g in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def agree(self, step: int, tensors: Iterable[torch.Tensor]) -> None:
        """Take the first process's tensors. Raises ValueError where processes resume at different steps."""
        if self.size == 1:
            return
        tensors = list(tensors)
        steps = tensors[0].new_zeros(self.size, dtype=torch.float64)
        steps[self.rank] = step
        if len(set(self.sum(steps).tolist())) > 1:
            raise ValueError("the processes resume at different steps: they must share --output-dir")
        for tensor in tensors:
            dist.broadcast(tensor, 0)

    def key(self, *numbers: int) -> tuple[int, ...]:
        """A seed that is this process's own."""
        return (*numbers, self.rank) if self.size > 1 else numbers
