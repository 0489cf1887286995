"""Random numbers that are functions of a key, so that no draw depends on what else is in the batch.

Unseeded requests draw uniforms keyed by (private 128-bit stream, anchor position, round, slot, purpose):
no noise is ever seen twice. Seeded requests use coupled Gumbel noise keyed by (seed, choice, position,
token): draft and target see the same noise, so the text does not depend on the drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch

from engine.native import rows
from engine.native.loader import native_library

_MASK = 0xFFFFFFFF
_PHILOX_M0, _PHILOX_M1 = 0xD2511F53, 0xCD9E8D57
_PHILOX_W0, _PHILOX_W1 = 0x9E3779B9, 0xBB67AE85


class Purpose(IntEnum):
    """What a uniform decides; each purpose is an independent stream."""

    DRAFT = 0
    ACCEPT = 1
    FINAL = 2  # the residual draw after a rejection, or the bonus draw


def philox(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Philox4x32-10 (Salmon et al., SC 2011). counter [..., 4], key [..., 2]: int64 in [0, 2^32).

    Returns [..., 4] int64 in [0, 2^32).
    """
    return torch.stack(_rounds(*counter.unbind(-1), *key.unbind(-1)), -1)


def _rounds(
    c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor, k0: torch.Tensor, k1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ten rounds on int64 tensors.

    Products of two 32-bit words wrap in int64, but their bit pattern is right, so the high word is recovered
    by shifting and masking.
    """
    for _ in range(10):
        p0, p1 = c0 * _PHILOX_M0, c2 * _PHILOX_M1
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + _PHILOX_W0) & _MASK, (k1 + _PHILOX_W1) & _MASK
    return c0, c1, c2, c3


def split_stream(stream: int) -> tuple[int, int, int, int]:
    """A 128-bit stream as four 32-bit words."""
    return tuple((stream >> shift) & _MASK for shift in (0, 32, 64, 96))  # type: ignore[return-value]


def uniforms(
    streams: torch.Tensor, positions: torch.Tensor, rounds: torch.Tensor, slots: int, purpose: Purpose
) -> torch.Tensor:
    """Uniforms in [0, 1) with 53 bits: [n, slots] float64.

    streams [n, 4], positions [n] (absolute position of the anchor), rounds [n]: int64. Within a
    stream, different (position, round, slot, purpose) give independent numbers; streams are random.
    """
    n = streams.shape[0]
    slot = torch.arange(slots, dtype=torch.int64, device=streams.device)
    counter = torch.stack(
        (
            positions[:, None].expand(n, slots),
            (slot * 4 + int(purpose)).expand(n, slots),
            ((rounds ^ streams[:, 3]) & _MASK)[:, None].expand(n, slots),
            streams[:, 2, None].expand(n, slots),
        ),
        -1,
    )
    words = philox(counter, streams[:, None, :2].expand(n, slots, 2))
    high, low = words[..., 0] >> 5, words[..., 1] >> 6
    return (high * 67108864 + low).to(torch.float64) * 2.0**-53


def row_keys(seeds: torch.Tensor, choices: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Keys of coupled noise, one a row: [n, 2] int32. All arguments [n] int64; seeds use all 64 bits."""
    counter = torch.stack(
        (positions, choices, torch.full_like(positions, 0x5EED), torch.zeros_like(positions)), -1
    )
    key = torch.stack((seeds & _MASK, (seeds >> 32) & _MASK), -1)
    words = philox(counter & _MASK, key)[..., :2]
    return (words - ((words >> 31) << 32)).to(torch.int32)  # the same bits, as signed words


def host_uniforms(
    streams: Sequence[tuple[int, int, int, int]],
    positions: Sequence[int],
    rounds: Sequence[int],
    slots: int,
    purpose: Purpose,
) -> list[list[float]]:
    """`uniforms` of a few sequences as plain numbers, in the kernels where they are: [n][slots]."""
    library = native_library()
    if library is not None:
        return rows.uniforms(library, streams, positions, rounds, slots, purpose)
    numbers: list[list[float]] = uniforms(
        torch.tensor(streams), torch.tensor(positions), torch.tensor(rounds), slots, purpose
    ).tolist()
    return numbers


def host_row_keys(
    seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]
) -> list[tuple[int, int]]:
    """`row_keys` as pairs of unsigned words."""
    library = native_library()
    if library is not None:
        return rows.row_keys(library, seeds, choices, positions)
    keys = row_keys(torch.tensor(seeds), torch.tensor(choices), torch.tensor(positions))
    return [(a & _MASK, b & _MASK) for a, b in keys.tolist()]


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijective 32-bit finaliser with full avalanche; works in place on int32.

    Shifts of int32 are arithmetic, hence the masks; products wrap, as they should.
    """
    x ^= (x >> 16) & 0xFFFF
    x *= 0x21F0AAAD
    x ^= (x >> 15) & 0x1FFFF
    x *= 0x735A2D97
    x ^= (x >> 15) & 0x1FFFF
    return x


def gumbels(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Gumbel noise of *target* tokens under each row's key.

    keys [n, 2] int32; tokens [V] (shared by the rows) or [n, V], int32. Returns [n, V] float32:
    -log E with E = -log1p(-(r + .5) / 2^32) and r a 32-bit hash.
    The clamp keeps E finite where float32 rounds the uniform to 1; E is never 0.
    """
    r = _mix(_mix(tokens ^ keys[:, :1]) + keys[:, 1:])
    u = r.to(torch.float32)
    u += (r < 0) * 4294967296.0
    u += 0.5
    u *= 2.0**-32
    u.clamp_(max=1.0 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()
