"""How many pages fit beside everything else, once a rehearsal has shown how much that is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes of a device: all, what is neither torch's nor free, what torch holds at rest, and at most."""

    total: int
    others: int
    rest: int
    peak: int


def pages_for(usage: Usage, utilization: float, page_bytes: int) -> int:
    """Pages that fit into a share of the device.

    What a step needs in between counts twice: graphs have memory of their own for it.
    """
    between = usage.peak - usage.rest
    free = utilization * usage.total - usage.others - usage.rest - 2 * between
    return max(0, int(free // page_bytes))


def measured(device: torch.device, rehearse: Callable[[], object]) -> Usage:
    """Of a CUDA device, with the largest steps that there can be in `rehearse`."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    rest = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    rehearse()
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.empty_cache()
    return Usage(total, others, rest, peak)
