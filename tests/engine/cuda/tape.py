"""A stand-in for CUDA graphs that replays recorded operations on recorded memory, and runs no Python again.

What a graph cannot do fails here as well: asking the device for a value, sizes that follow from values, data
that comes from the host, and memory that is not where it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: operations that wait for the device, or bring data from the host
_WAITS = {
    "_local_scalar_dense",
    "item",
    "is_nonzero",
    "nonzero",
    "masked_select",
    "equal",
    "lift_fresh",
    "_unique2",
    "bincount",
}


class CannotCapture(AssertionError):
    """A real graph could not have recorded this, or would replay something else."""


class TapeGraphs:
    """See `GraphBackend`."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        tape = _Tape()
        with tape:
            run()
        self.captured += 1

        def replay() -> None:
            self.replayed += 1
            tape.play()

        return replay


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, Any]] = []
        self._made: set[int] = set()
        self._outside: dict[int, tuple[torch.Tensor, tuple[int, ...], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition("::")[2].partition(".")[0]
        if name in _WAITS:
            raise CannotCapture(f"{name} inside a graph")
        tensors = [*_tensors(args), *_tensors(tuple(kwargs.values()))]
        if name.startswith("index") and any(each.dtype == torch.bool for each in tensors[1:]):
            raise CannotCapture(f"{name} by a mask inside a graph")
        for each in tensors:
            if id(each) not in self._made:
                self._outside[id(each)] = (each, tuple(each.shape), _address(each))
        out = func(*args, **kwargs)
        self._operations.append((func, args, kwargs, out))
        self._made.update(map(id, _tensors(out)))
        return out

    def play(self) -> None:
        for tensor, shape, address in self._outside.values():
            if tuple(tensor.shape) != shape or _address(tensor) != address:
                raise CannotCapture("memory that a graph reads has moved")
        now: dict[int, torch.Tensor] = {}

        def current(each: Any) -> Any:
            if isinstance(each, torch.Tensor):
                return now.get(id(each), each)
            if isinstance(each, list | tuple):
                return type(each)(map(current, each))
            return each

        for func, args, kwargs, out in self._operations:
            fresh = func(*map(current, args), **{name: current(each) for name, each in kwargs.items()})
            for old, new in zip(_tensors(out), _tensors(fresh), strict=True):
                now[id(old)] = new


def _tensors(value: Any) -> list[torch.Tensor]:
    """All that are in there, lists within lists included."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [found for each in value for found in _tensors(each)] if isinstance(value, list | tuple) else []


def _address(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_mkldnn else tensor.data_ptr()
