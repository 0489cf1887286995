"""`Laps` by the device's clock: there, a call returns long before its work is done."""

from __future__ import annotations

import torch


class CudaLaps:
    """Marks in the stream. Reading them waits for the last one, as the step's results nearly did already."""

    def __init__(self) -> None:
        self._marks: list[torch.cuda.Event] = []

    def lap(self) -> None:
        mark = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        mark.record()
        self._marks.append(mark)

    def seconds(self) -> list[float]:
        if self._marks:
            self._marks[-1].synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [1e-3 * before.elapsed_time(after) for before, after in pairs]
