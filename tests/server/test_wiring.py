"""Which executor runs a model, and what is said where none can as asked."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.models.config import ModelConfig
from engine.native.loader import supported
from server import wiring
from server.settings import Settings
from tests.engine.test_native import tiny

pytestmark = pytest.mark.skipif(not supported(), reason="the kernels were not built")


@pytest.fixture
def config() -> ModelConfig:
    return tiny("llama")[0]


def chosen(config: ModelConfig, **settings: str) -> str:
    return "native" if wiring._native(Settings.model_validate(settings), config) else "torch"


@pytest.mark.parametrize(
    ("kernels", "executor", "wanted"),
    [
        (("avx2", "portable"), "auto", "native"),
        (("portable",), "auto", "torch"),  # plain C++ is slower than torch
        (("portable",), "native", "native"),
        (("avx2", "portable"), "torch", "torch"),
    ],
)
def test_vector_kernels_are_taken_where_they_run(monkeypatch, config, kernels, executor, wanted):
    monkeypatch.setattr(wiring, "supported", lambda: kernels)
    assert chosen(config, executor=executor) == wanted


def test_what_the_kernels_do_not_run_goes_to_torch_or_is_refused(config):
    odd = replace(config, head_dim=24)
    assert chosen(odd) == "torch"
    assert chosen(config, dtype="float32") == "torch"
    with pytest.raises(wiring.BadSettings, match="multiple of 32"):
        chosen(odd, executor="native")
    with pytest.raises(wiring.BadSettings, match="float32"):
        chosen(config, executor="native", dtype="float32")
