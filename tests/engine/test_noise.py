"""Random numbers: the published generator, and streams that are independent of one another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from unittest import mock

import numpy as np
import pytest
import torch
from scipy import stats

from engine import noise
from engine.noise import (
    Purpose,
    gumbels,
    host_row_keys,
    host_uniforms,
    philox,
    row_keys,
    split_stream,
    uniforms,
)
from tests.engine.hashing import signed, unmix

#: a statistical test with a fixed seed fails by chance with this probability
ERROR_RATE = 1e-4

STREAM = (0x01234567, 0x89ABCDEF, 0xDEADBEEF, 0x0BADF00D)


def draws(
    stream: tuple[int, ...] = STREAM,
    position: int = 17,
    round: int = 3,
    slots: int = 4,
    purpose: Purpose = Purpose.ACCEPT,
) -> list[float]:
    """Uniforms of a single sequence."""
    key = [torch.tensor([value]) for value in (stream, position, round)]
    return list(uniforms(*key, slots, purpose)[0].tolist())


def many(
    count: int = 20_000, purpose: Purpose = Purpose.ACCEPT, slots: int = 1, round: int = 0
) -> np.ndarray:
    """Uniforms of one stream at `count` successive positions [count, slots]."""
    positions = torch.arange(count)
    streams = torch.tensor([STREAM]).expand(count, 4)
    return uniforms(streams, positions, torch.full((count,), round), slots, purpose).numpy()


def gumbel_rows(seeds: range, positions: range, choices: range, vocab: int) -> np.ndarray:
    """G of every (seed, position, choice) [n, vocab]."""
    grid = torch.tensor(list(itertools.product(seeds, positions, choices)), dtype=torch.int64)
    keys = row_keys(grid[:, 0], grid[:, 2], grid[:, 1])
    return gumbels(keys, torch.arange(vocab, dtype=torch.int32)).double().numpy()


def assert_uncorrelated(a: np.ndarray, b: np.ndarray) -> None:
    assert stats.pearsonr(a.ravel(), b.ravel()).pvalue > ERROR_RATE


# ---- the generator


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_gives_the_published_answers(counter: str, key: str, expected: str) -> None:
    def words(text: str) -> torch.Tensor:
        return torch.tensor([int(word, 16) for word in text.split()])

    assert philox(words(counter), words(key)).tolist() == words(expected).tolist()
    rows = philox(words(counter).expand(3, 2, 4), words(key).expand(3, 2, 2))
    assert (rows == words(expected)).all()


def test_a_stream_splits_into_its_words() -> None:
    assert split_stream(0x44444444_33333333_22222222_11111111) == (
        0x11111111,
        0x22222222,
        0x33333333,
        0x44444444,
    )
    assert split_stream(2**128 - 1) == (0xFFFFFFFF,) * 4


# ---- uniforms


def test_uniforms_cover_the_half_open_interval() -> None:
    """Even for the extreme words; 53 bits are used."""
    for word, expected in ((0, 0.0), (0xFFFFFFFF, 1.0 - 2.0**-53)):
        with mock.patch.object(noise, "philox", lambda counter, key, w=word: torch.full_like(counter, w)):
            assert draws() == [expected] * 4
    scaled = many().ravel() * 2.0**53
    assert (scaled == np.floor(scaled)).all()
    assert (scaled % 2).mean() == pytest.approx(0.5, abs=0.02)


def test_uniforms_are_uniform() -> None:
    for purpose in Purpose:
        assert stats.kstest(many(purpose=purpose, slots=3).ravel(), "uniform").pvalue > ERROR_RATE


@pytest.mark.parametrize("shift", [1, 2**16, 2**31])
def test_every_part_of_the_key_counts(shift: int) -> None:
    streams = [tuple(w ^ shift if i == j else w for i, w in enumerate(STREAM)) for j in range(4)]
    changed = [draws(stream=stream, slots=16) for stream in streams]
    changed += [draws(round=3 ^ shift, slots=16), draws(position=17 ^ shift, slots=16)]
    changed += [draws(purpose=purpose, slots=16) for purpose in Purpose if purpose is not Purpose.ACCEPT]
    base = draws(slots=16)
    assert len(set(base)) == 16
    for values in changed:
        assert not set(values) & set(base)
        assert len(set(values)) == 16


def test_keys_of_a_long_generation_never_meet() -> None:
    """Positions, rounds, slots and purposes of one stream are all told apart."""
    n = 24
    position, round = (torch.tensor(v) for v in zip(*itertools.product(range(n), range(n)), strict=True))
    streams = torch.tensor([STREAM]).expand(n * n, 4)
    values = torch.cat([uniforms(streams, position, round, 16, purpose).ravel() for purpose in Purpose])
    assert values.unique().numel() == n * n * 16 * len(Purpose)


def test_a_slot_does_not_depend_on_how_many_there_are_or_on_other_rows() -> None:
    """Nor do verify lengths of other sequences, therefore."""
    assert draws(slots=1) == draws(slots=16)[:1]
    rows = many(50, slots=5)
    for position in (0, 7, 49):
        assert draws(position=position, round=0, slots=5) == rows[position].tolist()


def test_purposes_slots_rounds_and_positions_are_uncorrelated() -> None:
    base = many(slots=4)
    others = {purpose: many(purpose=purpose, slots=4) for purpose in Purpose if purpose is not Purpose.ACCEPT}
    for other in others.values():
        assert_uncorrelated(base, other)
    assert_uncorrelated(*others.values())
    assert_uncorrelated(base, many(slots=4, round=1))
    assert_uncorrelated(base[1:], base[:-1])
    for a, b in itertools.combinations(range(4), 2):
        assert_uncorrelated(base[:, a], base[:, b])


def test_the_check_for_correlation_can_fail() -> None:
    base = many(slots=4)
    with pytest.raises(AssertionError):
        assert_uncorrelated(base, 0.05 * base + many(slots=4, round=1))


def test_plain_numbers_are_the_very_same() -> None:
    """Bit for bit, with every word of the key in use, in the kernels and without them."""
    generator = torch.Generator().manual_seed(0)
    streams = torch.randint(0, 2**32, (200, 4), generator=generator)
    wide = torch.randint(-(2**62), 2**62, (200,), generator=generator)
    positions, small = torch.arange(200) ** 3, torch.arange(200).flip(0)
    for library in (noise.native_library(), None):
        with mock.patch.object(noise, "native_library", return_value=library):
            for purpose in Purpose:
                plain = host_uniforms(streams.tolist(), positions.tolist(), small.tolist(), 7, purpose)
                assert plain == uniforms(streams, positions, small, 7, purpose).tolist()
            keys = host_row_keys(wide.tolist(), small.tolist(), positions.tolist())
            assert keys == [(a % 2**32, b % 2**32) for a, b in row_keys(wide, small, positions).tolist()]


# ---- coupled noise


def test_row_keys_depend_on_seed_choice_and_position() -> None:
    seeds = [0, 1, -1, 2**32, 2**62, -(2**63)]
    grid = torch.tensor(list(itertools.product(seeds, range(5), range(40))))
    keys = row_keys(grid[:, 0], grid[:, 1], grid[:, 2])
    assert keys.dtype == torch.int32
    assert keys.shape == (len(grid), 2)
    assert keys.unique(dim=0).shape[0] == len(grid)
    assert abs(float((keys < 0).double().mean()) - 0.5) < 0.05


def test_seed_plus_choice_does_not_overlap() -> None:
    """Choice 1 of seed 7 is not choice 0 of seed 8."""
    a, b = (gumbel_rows(range(s, s + 1), range(1), range(c, c + 1), 1000) for s, c in ((7, 1), (8, 0)))
    assert (a != b).mean() > 0.99


def test_the_hash_is_a_bijection() -> None:
    """So no two tokens of a row share their noise."""
    rng = np.random.default_rng(0)
    words = [0, 1, 2**15, 2**16, 2**30, 2**31, 2**32 - 1, *rng.integers(0, 2**32, 5000).tolist()]
    assert torch.equal(noise._mix(signed([unmix(word) for word in words])), signed(words))


def identity_hash() -> mock._patch[Callable[..., torch.Tensor]]:
    """Makes the 32-bit hash of a token the token itself."""
    return mock.patch.object(noise, "_mix", lambda x: x)


def test_gumbels_of_the_extreme_hashes_are_finite() -> None:
    """Neither E = 0 nor E = inf: the float traps. -log E with E = -log1p(-(r + .5) / 2^32)."""
    words = [0, 1, 2, 2**24 - 1, 2**24, 2**31 - 1, 2**31, 2**32 - 2**8, 2**32 - 2, 2**32 - 1]
    with identity_hash():
        g = gumbels(torch.zeros(1, 2, dtype=torch.int32), signed(words))[0]
    assert g.dtype == torch.float32
    assert g.isfinite().all()
    exact = [-math.log(-math.log1p(-(word + 0.5) / 2**32)) for word in words]
    assert g[:-3].tolist() == pytest.approx(exact[:-3], rel=1e-6)
    assert g[-3:].tolist() == pytest.approx([-math.log(24 * math.log(2))] * 3, abs=0.3)  # where u rounds to 1
    assert (g.diff() <= 0).all()
    assert float(g[0]) == pytest.approx(22.88, abs=0.01)
    assert float(g[-1]) == pytest.approx(-2.82, abs=0.01)


def test_gumbels_stay_in_range_for_a_whole_vocabulary() -> None:
    g = gumbel_rows(range(4), range(4), range(2), 50_000)
    assert np.isfinite(g).all()
    assert g.min() > -2.83
    assert g.max() < 22.89


def test_gumbels_follow_the_gumbel_law() -> None:
    for row in gumbel_rows(range(3), range(2), range(1), 50_000):
        assert stats.kstest(row, "gumbel_r").pvalue > ERROR_RATE
    across = gumbel_rows(range(1), range(20_000), range(1), 3)
    for token in range(3):
        assert stats.kstest(across[:, token], "gumbel_r").pvalue > ERROR_RATE
    seeds = gumbel_rows(range(20_000), range(1), range(1), 1)
    assert stats.kstest(seeds.ravel(), "gumbel_r").pvalue > ERROR_RATE


def test_gumbels_of_tokens_positions_seeds_and_choices_are_uncorrelated() -> None:
    """Compared as uniforms, so that the long tail does not drown everything."""

    def u(seed: int, position: int, choice: int) -> np.ndarray:
        row = gumbel_rows(
            range(seed, seed + 1), range(position, position + 1), range(choice, choice + 1), 50_000
        )
        return stats.gumbel_r.cdf(row[0])

    base = u(5, 100, 0)
    assert len(np.unique(base)) > 49_000
    for lag in (1, 2, 256, 4096):
        assert_uncorrelated(base[lag:], base[:-lag])
    for other in (u(6, 100, 0), u(5, 101, 0), u(5, 100, 1), u(4, 101, 0), u(6, 100, 1)):
        assert_uncorrelated(base, other)


def test_gumbels_of_neighbouring_tokens_are_independent_in_each_position() -> None:
    rows = stats.gumbel_r.cdf(gumbel_rows(range(1), range(20_000), range(1), 4))
    for a, b in itertools.combinations(range(4), 2):
        assert_uncorrelated(rows[:, a], rows[:, b])
        table, *_ = np.histogram2d(rows[:, a], rows[:, b], bins=8, range=[[0, 1], [0, 1]])
        assert stats.chisquare(table.ravel()).pvalue > ERROR_RATE
    assert_uncorrelated(rows[1:, 0], rows[:-1, 0])


def test_the_likeliest_gumbel_is_evenly_spread() -> None:
    winners = gumbel_rows(range(100), range(100), range(1), 16).argmax(-1)
    assert stats.chisquare(np.bincount(winners, minlength=16)).pvalue > ERROR_RATE


def test_a_token_has_the_same_gumbel_alone_and_in_its_row() -> None:
    """Only tokens with p > 0 are looked up, and a reduced vocabulary by its target ids."""
    keys = row_keys(torch.tensor([3, 4]), torch.tensor([0, 1]), torch.tensor([9, 9]))
    tokens = torch.arange(1000, dtype=torch.int32)
    whole = gumbels(keys, tokens)
    some = torch.tensor([[999, 0, 5], [17, 18, 19]], dtype=torch.int32)
    assert torch.equal(gumbels(keys, some), whole.gather(1, some.long()))
    assert torch.equal(tokens, torch.arange(1000, dtype=torch.int32)), "the argument was written to"
    for row in range(2):
        assert torch.equal(gumbels(keys[row : row + 1], tokens)[0], whole[row])
