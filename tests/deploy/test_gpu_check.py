"""The GPU check at toy size on the CPU: every step, what each would notice, the runner around them."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from deploy.gpu import (
    check,
    check_attention,
    check_costs,
    check_divergence,
    check_speed,
    check_stress,
    kit,
    stand_in,
)
from deploy.gpu.check_step import StepOptions
from deploy.gpu.drive import Text
from drafters.checkpoint import save
from drafters.config import DraftConfig
from drafters.model import DraftModel
from engine.batch import BatchItem, DraftBlock, Verdict
from engine.models.config import ModelConfig
from engine.outputs import TokenLogprob
from engine.params import SamplingParams
from engine.sampling import SamplingState
from tests.drafters.test_gpu_train import _TOY
from tests.drafters.test_gpu_train import parcel as parcel  # a fixture
from tests.engine.harness import VOCAB, hf_model, one_thread  # noqa: F401


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    """A tiny model with a tokenizer, and a draft model for it."""
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("work")
    model = hf_model("llama", initializer_range=0.3)
    model.save_pretrained(folder / "model")
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, "w0")).save(
        str(folder / "model/tokenizer.json")
    )
    (folder / "model" / "tokenizer_config.json").write_text("{}")
    config = DraftConfig.for_target(
        ModelConfig.from_folder(folder / "model"),
        mask_token_id=0,
        rank=8,
        target_layer_ids=(0, 1),
        num_layers=1,
    )
    torch.manual_seed(0)
    embedding, head = (
        model.get_input_embeddings().weight.detach(),
        model.get_output_embeddings().weight.detach(),
    )
    save(DraftModel(config, embedding, head), folder / "draft", torch.float32)
    return folder


@pytest.fixture
def options(work) -> StepOptions:
    return StepOptions(work, (), 20.0, dry=True)


# ---- the steps


def test_attention_passes_and_shows_every_kind_of_batch(options):
    result = check_attention.run(options)
    assert result["passed"]
    kinds = {case["batch"].partition(" ")[0] for case in result["cases"]}
    assert kinds == {"decode", "verification", "prefill", "draft-block", "replay"}
    assert all(case["padding_untouched"] for case in result["cases"] if case["batch"].startswith("replay"))
    assert check_attention.table(result).count("ok") == 10


@pytest.mark.parametrize("fault", ["mask", "last page", "stale plan"])
def test_attention_notices_a_wrong_kernel(options, monkeypatch, fault):
    right = stand_in.TorchWrapper

    class Wrong(right):
        def plan(self, *args, **how):
            args = list(args)
            if fault == "mask":
                how["causal"] = False
            if fault == "stale plan" and self.slots is not None:
                self.plans = getattr(self, "plans", 0) + 1
                if self.plans > 2:  # the third plan never arrives
                    return
            super().plan(*args, **how)
            if fault == "last page":
                self.tables[3] = (self.tables[3] - 1).clamp_min(1)

    monkeypatch.setattr(stand_in, "TorchWrapper", Wrong)
    assert not check_attention.run(options)["passed"]


def test_replays_have_rows_to_spare_and_slots_that_nobody_uses():
    batch = check_attention._verification(np.random.default_rng(0), 60, "replay 3", 64)
    assert len(batch.rows) == 64
    assert sum(batch.rows) < 64
    assert 0 in batch.rows
    assert all((rows == 0) == (keys == 0) for rows, keys in zip(batch.rows, batch.keys, strict=True))


def test_stress_plays_the_same_twice(options):
    result = check_stress.run(options)
    assert result["passed"]
    assert result["same_shapes"]
    assert result["differing"] == result["failed"] == 0
    assert result["shapes"] > 10
    assert result["texts"] > 10
    assert "differing" in check_stress.table(result)


def test_divergence_of_an_exact_executor_is_none(options):
    result = check_divergence.run(options)
    assert [(row["sampling"], row["policy"]) for row in result["rows"]] == [
        (sampling, policy)
        for sampling in ("greedy", "seeded")
        for policy in ("off", "off", "fixed:3", "lookahead")
    ]
    assert all(row["tokens"] == 6 * 12 for row in result["rows"])
    assert result["passed"]
    assert all(row["largest_gap"] < 1e-3 for row in result["rows"])
    check_divergence.table(result)


def reported(token: int, *top: tuple[int, float]) -> TokenLogprob:
    return TokenLogprob(token, dict(top)[token], top)


def test_a_gap_is_that_of_the_tokens_where_texts_part():
    a = Text([1, 2, 3], [reported(1, (1, -0.1)), reported(2, (2, -0.7), (9, -0.8)), reported(3, (3, 0.0))])
    assert check_divergence.first_gap(a, a, 5, None) is None
    assert check_divergence.first_gap(a, replace(a, tokens=[1, 9, 3]), 5, None) == pytest.approx(0.1)
    far = check_divergence.first_gap(a, replace(a, tokens=[1, 40, 3]), 5, None)
    assert far == pytest.approx(0.1)  # at least: 40 is not among those reported


def test_a_seeded_gap_counts_the_noise_that_decided(options):
    """Recomputed from a seeded text: its token is the best by log-probability and noise at every place."""
    from deploy.gpu.drive import Driver, Steps

    parts = options.parts(Steps(), speculative_config={"method": "off"}, num_pages=64)
    prompt, seed = [5, 6, 7], 42
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=8, ignore_eos=True, logprobs=20)
    (text,) = Driver(parts).answers([(prompt, params)])
    for place, row in enumerate(text.logprobs):
        for other, _ in row.top:
            pair = text.tokens[place], other
            mine, theirs = check_divergence.scores(row, pair, len(prompt) + place, seed)
            assert mine >= theirs
    assert any(row.top[0][0] != token for row, token in zip(text.logprobs, text.tokens, strict=True))


def test_costs_are_curves_and_service(options):
    result = check_costs.run(options)
    assert [row["streams"] for row in result["service"]] == [1, 4]
    assert all(row["tokens_per_second"] > 0 and 0 <= row["worker_idle"] < 1 for row in result["service"])
    assert result["service"][0]["device_idle"] is None
    assert len(result["verify"]) > 3
    assert "rows verified" in check_costs.table(result)


def test_idle_is_what_no_kernel_covers():
    assert check_costs.idle_share([]) is None
    assert check_costs.idle_share([(0, 1), (1, 4)]) == 0.0
    assert check_costs.idle_share([(5, 10), (0, 4), (2, 4)]) == pytest.approx(0.1)


def test_speed_is_measured_for_every_policy_and_says_what_is_made_up(options):
    result = check_speed.run(options)
    assert [(row["streams"], row["policy"]) for row in result["rows"]] == [
        (streams, policy) for streams in (1, 4) for policy in check_speed.POLICIES
    ]
    by_policy = {row["policy"]: row for row in result["rows"]}
    assert by_policy["off"]["tau"] == 1.0
    assert 1.5 < by_policy["fixed:4"]["tau"] < 4.0  # no drafts of random weights would be accepted
    assert "synthetic" in check_speed.table(result)
    assert not (options.work / "random-model").exists()


def item(verify: int, budget: int, sequence: int = 0, round_: int = 0) -> BatchItem:
    state = SamplingState(SamplingParams(temperature=0.0), VOCAB, frozenset())
    history, pages = np.arange(9, dtype=np.int32), np.arange(2, dtype=np.int32)
    draft = DraftBlock((11, 12, 13, 14)) if verify else None
    return BatchItem(sequence, history, 8, 1 + verify, pages, True, state, budget, round_, draft, verify)


def test_synthetic_acceptance_follows_its_chances_and_keeps_the_rules():
    counts = np.zeros(5)
    for number in range(3000):
        verdict = check_speed.drawn(item(4, 100, 3, number), Verdict((7,)))
        assert verdict.tokens == (*(11, 12, 13, 14)[: verdict.accepted], 7)
        counts[verdict.accepted] += 1
    survival = counts[::-1].cumsum()[::-1] / 3000
    assert survival[1:] == pytest.approx(np.cumprod(check_speed.chances(3, 4)), abs=0.03)
    assert check_speed.drawn(item(0, 100), Verdict()) == Verdict()
    for number in range(50):
        short = check_speed.drawn(item(4, 2, 3, number), Verdict((7,)))
        assert len(short.tokens) <= 2
        assert (short.finish == "length") == (len(short.tokens) == 2)
    block = check_speed.confident(DraftBlock((1, 2, 3)), 3)
    assert torch.tensor(block.confidence).sigmoid().tolist() == pytest.approx(check_speed.chances(3, 3))


# ---- the runner


def fake_step(name: str, body: str, folder: Path) -> check.Step:
    (folder / f"{name}_step.py").write_text(
        f"def run(options):\n    {body}\ndef table(result):\n    return 'a table'\n"
    )
    return check.Step(name, f"{name}_step", 5, 30)


def test_a_step_that_fails_crashes_or_hangs_takes_no_other_with_it(tmp_path, monkeypatch):
    steps = [
        fake_step("good", "return {'passed': True, 'figure': 1.5}", tmp_path),
        fake_step("wrong", "return {'passed': False}", tmp_path),
        fake_step("raises", "raise ValueError('no such kernel')", tmp_path),
        fake_step("dies", "import os; os._exit(9)", tmp_path),
        fake_step("hangs", "import time; time.sleep(60)", tmp_path),
        fake_step("late", "return {'passed': True}", tmp_path),
    ]
    monkeypatch.setattr(check, "STEPS", tuple(steps))
    monkeypatch.setattr(check, "_GRACE", 0.0)
    started = []

    def run(command, *, timeout, **_):
        """In this process, but for what would not come back from it."""
        name, told = command[-2], json.loads(command[-1])
        started.append((name, timeout, (tmp_path / "out" / "check.json").exists()))
        if name == "hangs":
            raise check.subprocess.TimeoutExpired(command, timeout)
        if name != "dies":
            monkeypatch.syspath_prepend(str(tmp_path))
            check._step(check.argparse.Namespace(name=name, told=json.dumps(told)))

    monkeypatch.setattr(check, "machine", dict)
    monkeypatch.setattr(check.subprocess, "run", run)
    arguments = ["run", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--minutes", "6"]
    assert check.main(arguments) == 1
    report = json.loads((tmp_path / "out" / "check.json").read_text())["steps"]
    status = {name: entry["status"] for name, entry in report.items()}
    assert status["good"] == "ok"
    assert status["wrong"] == "wrong"
    assert status["raises"] == status["dies"] == status["hangs"] == "failed"
    assert "no such kernel" in report["raises"]["why"]
    assert report["good"]["result"]["figure"] == 1.5
    assert [known for _, _, known in started] == [False] + [True] * (len(started) - 1)
    assert "a table" in (tmp_path / "out" / "check.txt").read_text()


def test_what_there_is_no_time_for_is_passed_over_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(check, "machine", dict)
    monkeypatch.setattr(check.subprocess, "run", None)
    arguments = ["run", "--out", str(tmp_path / "out"), "--work", str(tmp_path / "work"), "--minutes", "0.01"]
    assert check.main(arguments) == 0
    report = json.loads((tmp_path / "out" / "check.json").read_text())["steps"]
    assert {entry["status"] for entry in report.values()} == {"passed over"}
    assert list(report) == [step.name for step in check.STEPS]


@pytest.mark.long
def test_a_dry_run_is_the_real_thing_in_processes_of_its_own(work, tmp_path, capfd):
    arguments = [
        "run",
        "--dry-run",
        "--out",
        str(tmp_path),
        "--work",
        str(work),
        "--only",
        "attention",
        "costs",
    ]
    assert check.main(arguments) == 0
    report = json.loads((tmp_path / "check.json").read_text())
    assert report["dry_run"]
    assert {name: entry["status"] for name, entry in report["steps"].items()} == {
        "attention": "ok",
        "costs": "ok",
    }
    assert len(list(tmp_path.iterdir())) == 2
    assert "tokens_per_second" in capfd.readouterr().out


# ---- there and back


def test_only_what_runs_travels(tmp_path):
    package = tmp_path / "site" / "flashinfer"
    for name in (
        "__init__.py",
        "jit/core.py",
        "data/csrc/a.jinja",
        "data/csrc/a.cu",
        "data/csrc/batch_prefill.cu",
        "data/cutlass/big.h",
    ):
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(name)
    with pytest.raises(ValueError, match="warm_kernels"):
        kit.slim(package, tmp_path / "slim.zip")
    (package / "data" / "aot" / "m").mkdir(parents=True)
    (package / "data" / "aot" / "m" / "m.so").write_text("code")
    info = tmp_path / "site" / "flashinfer_python-0.7.2.post1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: flashinfer-python")
    kit.slim(package, tmp_path / "slim.zip")
    assert sorted(zipfile.ZipFile(tmp_path / "slim.zip").namelist()) == [
        "flashinfer/__init__.py",
        "flashinfer/data/aot/m/m.so",
        "flashinfer/data/csrc/a.jinja",
        "flashinfer/data/csrc/batch_prefill.cu",
        "flashinfer/jit/core.py",
        "flashinfer_python-0.7.2.post1.dist-info/METADATA",
    ]


def test_packages_are_unpacked_and_found_by_the_steps(tmp_path, monkeypatch):
    piece, model = tmp_path / "piece", tmp_path / "work" / "model"
    piece.mkdir()
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    with zipfile.ZipFile(piece / "thing-1-py3-none-any.whl", "w") as archive:
        archive.writestr("thing.py", "")
    with zipfile.ZipFile(piece / "flashinfer.zip", "w") as archive:
        archive.writestr("flashinfer/data/aot/m/m.so", "")
    site = kit.unpack([piece], tmp_path / "work")
    assert (site / "thing.py").exists()
    found = kit.environment(site)
    assert str(site) in found["PYTHONPATH"].split(":")
    assert found["FLASHINFER_DISABLE_JIT"] == "1"
    assert "FLASHINFER_DISABLE_JIT" not in kit.environment(None)


def test_a_bundle_comes_back_whole_in_few_files(tmp_path, monkeypatch):
    monkeypatch.setattr(kit, "_RETURNED", 4096)
    folder, out = tmp_path / "bundle", tmp_path / "out"
    kit.bundle(folder, out)
    assert not out.exists()
    folder.mkdir()
    (folder / "draft.0").write_bytes(bytes(range(256)) * 40)
    (folder / "config.json").write_text("{}")
    kit.bundle(folder, out)
    (folder / "config.json").unlink()
    (folder / "draft.0").write_bytes(b"weights")
    kit.bundle(folder, out)  # what was there before is replaced, all of it
    (folder / "config.json").write_text('{"a": 1}')
    kit.bundle(folder, out)
    assert kit.unbundle(out, tmp_path / "draft") == 0
    assert (tmp_path / "draft" / "model.safetensors").read_bytes() == b"weights"
    assert (tmp_path / "draft" / "config.json").read_text() == '{"a": 1}'


def test_training_is_the_last_step_and_hands_over_its_newest_figures(tmp_path, monkeypatch):
    from deploy.gpu import check_training

    file = tmp_path / "metrics.csv"
    file.write_text("step,loss\n10,2.5\n20,1.5\n")
    assert check_training.last_line(file) == {"evaluations": 2, "step": 20.0, "loss": 1.5}
    with pytest.raises(ValueError, match="no pieces"):
        check_training.run(StepOptions(tmp_path, (), 100.0))
    asked = []

    def run(arguments):
        asked.append(arguments)
        (tmp_path / "bundle").mkdir()
        (tmp_path / "bundle" / "metrics.csv").write_text("step,loss\n7,3.5\n")
        (tmp_path / "bundle" / "draft.0").touch()
        return 0

    monkeypatch.setattr(check_training.train, "main", run)
    result = check_training.run(StepOptions(tmp_path, (tmp_path / "0",), 260.0))
    assert result == {"evaluations": 1, "step": 7.0, "loss": 3.5, "passed": True}
    assert asked[0][asked[0].index("--minutes") + 1] == "4.0"
    assert check.STEPS[-1].name == "training"


def test_modules_of_all_steps_can_be_imported():
    for step in check.STEPS:
        module = __import__(step.module, fromlist=["run"])
        assert isinstance(module, ModuleType)
        assert callable(module.run)
        assert callable(module.table)
    assert "deploy.gpu.check" in sys.modules


@pytest.mark.long
def test_training_at_toy_size_brings_a_draft_model_back(parcel):
    from deploy.gpu import check_training
    from drafters.checkpoint import load

    (parcel / "work").mkdir()
    recipe = json.dumps({**_TOY, "draft_vocab": 32, "window": 8, "mask_token_id": 1})
    (parcel / "work" / "recipe.json").write_text(recipe)
    pieces = tuple(sorted((parcel / "pieces").iterdir()))
    result = check_training.run(StepOptions(parcel / "work", pieces, 60.0, dry=True))
    assert result["passed"]
    assert result["step"] > 0
    assert "loss" in check_training.table(result)
    kit.bundle(parcel / "work" / "bundle", parcel / "out")
    assert kit.unbundle(parcel / "out", parcel / "draft") == 0
    embedding = hf_model("llama", initializer_range=0.3).get_input_embeddings().weight.detach()
    assert load(parcel / "draft", embedding, embedding).config.draft_vocab_size == 32


def test_whatever_the_steps_import_is_there_or_travels():
    """The engine may come to need more; the GPU machine has torch, transformers and what these need."""
    there = {"torch", "transformers", "tokenizers", "safetensors", "numpy", "jinja2", "markupsafe", "tqdm"}
    code = (
        "import sys, importlib.metadata as m\n"
        "import deploy.gpu.check, deploy.gpu.check_speed, server.wiring\n"
        "tops, of = {n.partition('.')[0] for n in sys.modules}, m.packages_distributions()\n"
        "print(*{name.lower().replace('_', '-') for top in tops for name in of.get(top, ())})\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    needed = set(done.stdout.split()) - there - {"dspark-server", "setuptools"}
    assert needed <= set(kit.PACKAGES)


@pytest.mark.parametrize("script", ["check", "train, deploy.gpu.answer"])
def test_what_unpacks_the_packages_needs_none_of_them(script):
    """The runner starts before anything that travelled is there; training alone never gets it at all."""
    # typing_extensions is there: torch needs it.
    missing = {name.replace("-", "_") for name in kit.PACKAGES} - {"typing_extensions"}
    code = f"import sys\nsys.modules.update(dict.fromkeys({sorted(missing)}))\nimport deploy.gpu.{script}\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
