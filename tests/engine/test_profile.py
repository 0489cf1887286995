"""Profiles of a tiny model: they reach as far as steps can, and leave nothing behind."""

from __future__ import annotations

import pytest
import torch

from engine.profile import Profiler
from engine.torch_executor import TorchExecutor
from engine.worker import Worker
from tests.drafters.test_chain import Pair
from tests.engine.harness import VOCAB, Engine, tiny


@pytest.mark.parametrize("drafting", [False, True])
def test_a_profile_covers_every_step_there_can_be(drafting):
    pair = Pair("eagle3")
    worker = Worker(TorchExecutor(pair.decoder, 60, 16), pair.drafter() if drafting else None)
    lines: list[str] = []
    gamma = pair.config.gamma if drafting else 0
    model = Profiler(worker, VOCAB, 60, 16, gamma, gamma, context=64).run(40, 6, lines.append)
    model.check(40)
    assert model.verify.sizes == [*range(1, 11), 12, 13, 16, 20, 24, 32, 40]
    assert min(model.verify.seconds) > 0
    assert model.per_context >= 0
    if drafting:
        assert gamma == 5
        assert model.draft.sizes == [1, 2, 3, 5, 6, 12, 18, 30]
        assert model.draft.seconds[0] > 0
    else:
        assert model.draft.at([3]).tolist() == [0.0]
    assert len(lines) == 1 + drafting


def test_a_pool_too_small_for_the_context_is_used_as_far_as_it_goes():
    worker = Worker(TorchExecutor(tiny(), 3, 4, torch.float64), None)
    profiler = Profiler(worker, VOCAB, 3, 4, 0, 0, context=256)
    assert profiler.context == 4
    profiler.run(8, 2).check(8)


def test_texts_after_a_profile_are_those_without():
    model = tiny()

    def texts(profiled: bool):
        engine = Engine(model, None, "off")
        if profiled:
            Profiler(engine.worker, VOCAB, 16, engine.loop.pool.page_size, 0, 0, context=20).run(16, 4)
        for index in range(4):
            engine.add(str(index), [3 + index, 5, 7] * 3, max_tokens=20, temperature=0.0, ignore_eos=True)
        engine.run()
        return engine.texts()

    assert texts(True) == texts(False)


def test_an_executor_that_pads_is_timed_at_its_sizes():
    """Costs are a staircase there, and past the last size there are points to go on from."""
    worker = Worker(TorchExecutor(tiny(), 16, 4, torch.float64), None)
    profiler = Profiler(worker, VOCAB, 16, 4, 0, 0, context=20, buckets=(1, 2, 4, 8))
    model = profiler.run(6, 2)
    assert model.verify.sizes == [1, 2, 4, 6]
    assert model.verify.staircase
    assert profiler._sizes(600) == [1, 2, 4, 8, 264, 520, 600]


def test_a_rehearsal_runs_the_largest_steps():
    pair = Pair("eagle3")
    worker = Worker(TorchExecutor(pair.decoder, 4, 16), pair.drafter())
    rows = []
    plain = worker.executor.forward
    worker.executor.forward = lambda batch, layers=(): rows.append(batch.rows) or plain(batch, layers)
    gamma = pair.config.gamma
    Profiler(worker, VOCAB, 4, 16, gamma, gamma).rehearse(12, 100, 3)
    assert rows == [100, 12, 3]
