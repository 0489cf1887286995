"""What this process may use: cores and memory by affinity and container limits, not by the host's size."""

from __future__ import annotations

import math
import os
from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Cores by CPU affinity, lowered by the container's CPU quota (cgroup v2 or v1), at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    quota = _cpu_quota()
    return max(1, min(cores, math.ceil(quota))) if quota else cores


def usable_memory() -> int:
    """Bytes that this process could still take: available memory, lowered by the container's limit."""
    available = _available_memory()
    limit = _read_int(_CGROUP / "memory.max") or _read_int(_CGROUP / "memory/memory.limit_in_bytes")
    used = _read_int(_CGROUP / "memory.current") or _read_int(_CGROUP / "memory/memory.usage_in_bytes") or 0
    return min(available, max(0, limit - used)) if limit else available


def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 in hardware (AVX-512 BF16, AMX, or Arm's equivalent)."""
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported", "_is_arm_bf16_supported"):
        probe = getattr(torch.cpu, name, None)
        if probe is not None and probe():
            return True
    return False


def _cpu_quota() -> float | None:
    """Cores' worth of CPU time that the container may use, None if unlimited."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    quota_us = _read_int(_CGROUP / "cpu/cpu.cfs_quota_us")
    period_us = _read_int(_CGROUP / "cpu/cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _available_memory() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return 4 << 30


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
