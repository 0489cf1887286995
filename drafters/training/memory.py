"""Memory that is given back to the system is paid for again, page by page, when it is next touched."""

from __future__ import annotations

import ctypes
import sys

# Of glibc's malloc.h
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3


def keep_memory() -> None:
    """Let this process keep what it frees; a training step's big temporaries come and go.

    That was a quarter of a step's time. Does nothing where the C library has no such knob.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 32 << 20)  # the most that it takes
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)
        mallopt(_TOP_PAD, 64 << 20)
