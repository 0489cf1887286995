"""Host memory is never rewritten before it was copied, and the fake would notice if it were."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.cuda.staging import Inputs, Staging
from tests.engine.cuda.fake_stream import FakeStream


def arrays(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [
        rng.integers(0, 100, 3),
        rng.random((2, 2)),
        rng.integers(0, 9, (0, 4)).astype(np.int32),
        rng.integers(0, 9, 5).astype(np.int32),
    ]


def test_arrays_arrive_in_one_copy():
    stream = FakeStream()
    staging = Staging(stream)
    with staging.turn() as writer:
        found = writer.device(*arrays(0))
    assert stream.issued == 1
    for tensor, array in zip(found, arrays(0), strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
        assert not stream.is_pinned(tensor)


def test_host_tensors_are_pinned_and_keep_their_type():
    stream = FakeStream()
    with Staging(stream).turn() as writer:
        tensor = writer.host(np.array([1, 2], dtype=np.int32))
        other = writer.host(np.array([0.5]))
    assert tensor.dtype == torch.int32
    assert tensor.tolist() == [1, 2]
    assert other.tolist() == [0.5]
    assert stream.is_pinned(tensor)


def test_turns_wait_for_their_own_copies_only():
    stream = FakeStream()
    staging = Staging(stream)
    for seed in range(2):
        with staging.turn() as writer:
            writer.device(*arrays(seed))
    assert stream.done == 0, "two buffers: nothing to wait for yet"
    with staging.turn() as writer:
        assert stream.done == 1
        writer.device(*arrays(2))
    with staging.turn():
        assert stream.done == 2


@pytest.mark.parametrize("size", [16, 1 << 16])
def test_many_turns_of_any_size_send_what_they_meant(size):
    """Small buffers are outgrown while copies from them are on their way."""
    stream = FakeStream()
    staging = Staging(stream, size)
    sent = []
    for seed in range(20):
        with staging.turn() as writer:
            for part in range(seed % 3 + 1):
                sent.append((seed, part, writer.device(*arrays(seed + part))))
    stream.check()
    for seed, part, found in sent:
        for tensor, array in zip(found, arrays(seed + part), strict=True):
            assert torch.equal(tensor, torch.from_numpy(array))


def test_without_waiting_the_fake_notices():
    class NoFence(FakeStream):
        def fence(self):
            fence = super().fence()
            fence.number = 0
            return fence

    def send_often() -> None:
        staging = Staging(NoFence())
        for seed in range(4):
            with staging.turn() as writer:
                writer.device(*arrays(seed))

    with pytest.raises(AssertionError, match="changed before"):
        send_often()


def test_inputs_stay_where_they_are():
    stream = FakeStream()
    staging = Staging(stream)
    inputs = Inputs(stream.device, {"a": ((3,), torch.int64), "b": ((2, 2), torch.float64)})
    places = inputs["a"].data_ptr(), inputs["b"].data_ptr()
    for seed in range(3):
        a, b, *_ = arrays(seed)
        with staging.turn() as writer:
            inputs.fill(writer, {"b": b, "a": a})
        assert torch.equal(inputs["a"], torch.from_numpy(a))
        assert torch.equal(inputs["b"], torch.from_numpy(b))
    assert (inputs["a"].data_ptr(), inputs["b"].data_ptr()) == places
    assert stream.issued == 3
    with staging.turn() as writer, pytest.raises(ValueError, match="a: "):
        inputs.fill(writer, {"a": np.zeros(4, dtype=np.int64), "b": b})
    with staging.turn() as writer, pytest.raises(ValueError, match="b: "):
        inputs.fill(writer, {"a": a, "b": b.astype(np.float32)})
