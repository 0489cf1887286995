"""The hash of coupled noise, backwards: to make keys whose noise is as extreme as a test wants it."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def unmix(x: int) -> int:
    """The word that `engine.noise._mix` turns into `x`."""
    mask = 0xFFFFFFFF
    x ^= x >> 15 ^ x >> 30
    x = x * pow(0x735A2D97, -1, 2**32) & mask
    x ^= x >> 15 ^ x >> 30
    x = x * pow(0x21F0AAAD, -1, 2**32) & mask
    return x ^ x >> 16


def signed(words: Sequence[int]) -> torch.Tensor:
    """32-bit words as int32."""
    return torch.tensor([word - (word >> 31 << 32) for word in words], dtype=torch.int32)
