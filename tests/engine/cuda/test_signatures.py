"""FlashInfer takes the calls that we make: its signatures were recorded from the pinned version."""

from __future__ import annotations

import inspect
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.gpu import warm_kernels
from engine.cuda.flashinfer import VERSION, FlashInferMissing
from tests.engine.cuda.fake_flashinfer import FakeWrapper
from tests.engine.cuda.harness import Device, bounded
from tests.engine.cuda.record_signatures import FILE, METHODS, loaded_modules, signatures

RECORDED = json.loads(FILE.read_text(encoding="utf-8"))


def signature(name: str) -> inspect.Signature:
    return inspect.Signature(
        [
            inspect.Parameter(
                each, getattr(inspect.Parameter, kind), **({"default": None} if has_default else {})
            )
            for each, kind, has_default in RECORDED["methods"][name]
        ]
    )


def test_they_are_of_the_pinned_version():
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    assert project["project"]["optional-dependencies"]["gpu"] == [f"flashinfer-python=={VERSION}"]
    assert RECORDED["version"] == VERSION


def test_what_is_compiled_ahead_is_what_the_wrapper_loads():
    (generator,) = RECORDED["modules"]
    source = inspect.getsource(warm_kernels.modules)
    assert f"import {generator} as" in source


def test_every_call_fits(monkeypatch):
    """All calls of a capture, a replay and a step without a graph, with their arguments."""
    made: dict[str, int] = dict.fromkeys(METHODS, 0)

    def watched(name: str) -> Any:
        plain, wanted = getattr(FakeWrapper, name), signature(name)

        def call(self: FakeWrapper, *args: Any, **kwargs: Any) -> Any:
            wanted.bind(self, *args, **kwargs)
            made[name] += 1
            return plain(self, *args, **kwargs)

        return call

    for name in METHODS:
        monkeypatch.setattr(FakeWrapper, name, watched(name))
    device = Device(bounded("qwen3"))
    engine = device.engine(capture=8)
    engine.add("a", [3, 4, 5], max_tokens=4, temperature=0.0)
    engine.run()
    assert all(made.values()), made


@pytest.mark.parametrize("name", [name for name in METHODS if name != "__init__"])
def test_the_fake_takes_nothing_that_the_real_one_does_not(name):
    known = set(signature(name).parameters)
    ours = {
        each.name
        for each in inspect.signature(getattr(FakeWrapper, name)).parameters.values()
        if each.kind not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    }
    assert ours <= known


def test_an_argument_that_does_not_exist_would_be_noticed():
    with pytest.raises(TypeError):
        signature("plan").bind(None, *range(8), uniform_tile=True)


def test_the_record_is_what_is_installed():
    try:
        found = signatures()
    except FlashInferMissing as error:
        pytest.skip(str(error))
    if found["version"] != RECORDED["version"]:
        pytest.skip(f"FlashInfer {found['version']} is installed, {RECORDED['version']} was recorded")
    assert found | {"modules": loaded_modules()} == RECORDED
    assert torch.__version__
