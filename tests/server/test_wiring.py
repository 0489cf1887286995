"""Which executor runs a model, and what is said where none can as asked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import drafters.shipped
from engine.models.config import ModelConfig
from engine.native.loader import supported
from server import executors, wiring
from server.settings import Settings
from server.speculative_config import SpeculativeConfig
from tests.engine.test_native import tiny

pytestmark = pytest.mark.skipif(not supported(), reason="the kernels were not built")


@pytest.fixture
def config() -> ModelConfig:
    return tiny("llama")[0]


def chosen(config: ModelConfig, **settings: str) -> str:
    return executors.chosen(Settings.model_validate(settings), config)


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
    monkeypatch.setattr(executors, "supported", lambda: kernels)
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


def test_a_gpu_is_taken_where_there_is_one_and_the_model_runs_on_it(monkeypatch, config):
    with pytest.raises(wiring.BadSettings, match="no CUDA device"):
        chosen(config, executor="cuda")
    monkeypatch.setattr(executors.torch.cuda, "is_available", lambda: True)
    assert chosen(config) == chosen(config, executor="cuda") == "cuda"
    assert chosen(config, executor="native") == "native"
    assert chosen(config, executor="torch") == "torch"
    assert chosen(config, quantization="gguf") == "native"  # the blocks of a file are the kernels' to read
    other = replace(config, architecture="Gemma2ForCausalLM", fused=False)
    assert chosen(other) == "torch"
    with pytest.raises(wiring.BadSettings, match="Gemma2ForCausalLM does not run"):
        chosen(other, executor="cuda")


def test_a_step_has_more_rows_on_a_gpu(monkeypatch, config):
    assert executors.token_budget(Settings(), config) == 128
    assert executors.token_budget(Settings(max_num_seqs=300), config) == 300
    monkeypatch.setattr(executors.torch.cuda, "is_available", lambda: True)
    assert executors.token_budget(Settings(), config) == 2048
    with pytest.raises(wiring.BadSettings, match="at least --max-num-seqs"):
        executors.token_budget(Settings(max_num_batched_tokens=8), config)


def test_a_draft_model_may_be_named_by_its_hub_id(monkeypatch, tmp_path):
    asked = []

    def locate(spec, cache, progress):
        asked.append((spec, cache))
        if spec == "no/such":
            raise FileNotFoundError("'no/such' could not be fetched from the hub")
        return tmp_path / "fetched"

    monkeypatch.setattr(wiring, "locate_draft_model", locate)

    def located(**config: str) -> Settings:
        return wiring._with_draft_folder(Settings(speculative_config=config), tmp_path, print)

    found = located(method="dspark", model="deepseek-ai/dspark_qwen3_8b_block7")
    assert found.speculative_config.model == str(tmp_path / "fetched")
    assert asked == [("deepseek-ai/dspark_qwen3_8b_block7", tmp_path)]
    assert located(method="off", model="any/thing").speculative_config.model == "any/thing"
    assert located(method="hybrid").speculative_config.model is None
    assert len(asked) == 1  # what is not needed is not fetched
    with pytest.raises(wiring.BadSettings, match="--speculative-config: 'no/such' could not be fetched"):
        located(method="eagle3", model="no/such")
