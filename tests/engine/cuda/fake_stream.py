"""A device on the CPU that notices what a real one would silently get wrong."""

from __future__ import annotations

import torch


class FakeStream:
    """Copies are made at once, but count as executed only when someone has waited for them.

    Host memory that changed in between would have sent something else: `check` fails then.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.issued = self.done = self.fetched = 0
        self._flying: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._pinned: set[int] = set()
        self._kept: list[torch.Tensor] = []  # so that an address is never given out again

    def pinned(self, size: int) -> torch.Tensor:
        memory = torch.full((size,), 0xAB, dtype=torch.uint8)
        self._kept.append(memory)
        self._pinned.add(memory.untyped_storage().data_ptr())
        return memory

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned

    def queue(self) -> int:
        """The number of one more piece of work."""
        self.check()
        self.issued += 1
        return self.issued

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self.is_pinned(source), "a copy from pageable memory waits"
        number = self.queue()
        target.copy_(source)
        self.watch(number, source)

    def watch(self, number: int, source: torch.Tensor) -> None:
        """`source` must stay as it is until this piece of work is done."""
        self._flying.append((number, source, source.clone()))

    def fence(self) -> Fence:
        self.check()
        return Fence(self, self.issued)

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        self.fetched += 1
        self.reach(self.issued)
        return tensor.clone()

    def reach(self, number: int) -> None:
        """Everything up to this number has been executed."""
        self.check()
        self.done = max(self.done, number)
        self._flying = [each for each in self._flying if each[0] > self.done]

    def check(self) -> None:
        for _, source, snapshot in self._flying:
            assert torch.equal(source, snapshot), "host memory changed before its copy was executed"


class Fence:
    def __init__(self, stream: FakeStream, number: int) -> None:
        self.stream, self.number = stream, number

    def wait(self) -> None:
        self.stream.reach(self.number)
