"""Which executor runs a model, and what is said where none can as asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import drafters.shipped
from engine.models.config import ModelConfig
from engine.native.loader import supported
from server import wiring
from server.settings import Settings, SpeculativeConfig
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


def test_a_shipped_drafter_is_found_by_its_targets_file(monkeypatch, tmp_path):
    shipped = tmp_path / "shipped" / "tiny"
    shipped.mkdir(parents=True)
    (shipped / "target.json").write_text('{"sha256": "abc"}')
    monkeypatch.setattr(drafters.shipped, "__file__", str(shipped.parent / "__init__.py"))
    folder = tmp_path / "model"
    folder.mkdir()
    assert drafters.shipped.shipped_drafter(folder) is None  # no GGUF behind it
    (folder / "source.json").write_text('{"sha256": "other"}')
    assert drafters.shipped.shipped_drafter(folder) is None
    (folder / "source.json").write_text('{"sha256": "abc"}')
    assert drafters.shipped.shipped_drafter(folder) == shipped
    assert wiring._draft_model(SpeculativeConfig(), folder) == shipped
    assert wiring._draft_model(SpeculativeConfig(method="ngram"), folder) is None
    assert wiring._draft_model(SpeculativeConfig(method="dspark", model="/x"), folder) == Path("/x")


def test_a_method_that_needs_a_draft_model_says_so(tmp_path):
    assert wiring._draft_model(SpeculativeConfig(), tmp_path) is None  # auto: prompt lookup
    with pytest.raises(wiring.BadSettings, match="none is shipped"):
        wiring._draft_model(SpeculativeConfig(method="eagle3"), tmp_path)


def test_what_the_kernels_do_not_run_goes_to_torch_or_is_refused(config):
    odd = replace(config, head_dim=24)
    assert chosen(odd) == "torch"
    assert chosen(config, dtype="float32") == "torch"
    with pytest.raises(wiring.BadSettings, match="multiple of 32"):
        chosen(odd, executor="native")
    with pytest.raises(wiring.BadSettings, match="float32"):
        chosen(config, executor="native", dtype="float32")
