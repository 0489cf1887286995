"""Which kernels are compiled, where they go, what is said where they cannot be: with a made-up flashinfer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from deploy.gpu import warm_kernels
from deploy.gpu.warm_kernels import main

FAKE = """
import json, os
from dataclasses import dataclass
from pathlib import Path
from flashinfer.jit import env

@dataclass
class Spec:
    name: str

    @property
    def jit_library_path(self):
        return env.BASE / "cached" / f"{self.name}.so"

    @property
    def aot_path(self):
        return env.FLASHINFER_AOT_DIR / self.name / f"{self.name}.so"

    def build(self, verbose):
        if (env.BASE / "broken").exists():
            raise RuntimeError("nvcc: no such architecture")
        self.jit_library_path.parent.mkdir(exist_ok=True)
        self.jit_library_path.write_bytes(self.name.encode())
        with (env.BASE / "built").open("a") as log:
            log.write(f"{self.name} {os.environ['FLASHINFER_CUDA_ARCH_LIST']}\\n")

def _gen_batch_prefill_primary_module(
    backend, q, kv, out, idx, dim_qk, dim_vo, positions, window, softcap, fp16
):
    assert str(q) == str(kv) == str(out) == "torch.bfloat16" and str(idx) == "torch.int32"
    assert dim_qk == dim_vo and positions == 0 and not softcap and not fp16
    return Spec(f"{backend}-{dim_qk}" + "-window" * window)
"""


@pytest.fixture
def toolkit(tmp_path, monkeypatch) -> Iterator[Path]:
    """A flashinfer, nvcc, ninja and a compiler that are none."""
    package = tmp_path / "site" / "flashinfer"
    (package / "jit").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.7.2.post1'\n")
    (package / "jit" / "__init__.py").touch()
    env = f"from pathlib import Path\nBASE = Path({str(tmp_path)!r})\nFLASHINFER_AOT_DIR = BASE / 'aot'\n"
    (package / "jit" / "env.py").write_text(env)
    (package / "jit" / "attention").mkdir()
    (package / "jit" / "attention" / "__init__.py").touch()
    (package / "jit" / "attention" / "modules.py").write_text(FAKE)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    tools = tmp_path / "cuda" / "bin"
    tools.mkdir(parents=True)
    for name in ("nvcc", "ninja", "c++"):
        (tools / name).write_text("#!/bin/sh\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "")
    real = forget()
    yield tmp_path
    forget()  # or the next tests would find it
    sys.modules.update(real)


def forget() -> dict[str, ModuleType]:
    """What is loaded of flashinfer, and is from now on no more."""
    names = [name for name in sys.modules if name.partition(".")[0] == "flashinfer"]
    return {name: sys.modules.pop(name) for name in names}


def built(folder: Path) -> list[str]:
    file = folder / "built"
    return file.read_text().splitlines() if file.exists() else []


def test_modules_go_where_flashinfer_looks_before_it_compiles(toolkit):
    assert main(["--arch", "8.0", "9.0a", "--head-dims", "64", "128"]) == 0
    assert built(toolkit) == ["fa2-64 8.0 9.0a", "fa2-128 8.0 9.0a"]
    for name in ("fa2-64", "fa2-128"):
        assert (toolkit / "aot" / name / f"{name}.so").read_text() == name
    assert sorted(path.name for path in (toolkit / "aot").iterdir()) == ["dspark.json", "fa2-128", "fa2-64"]


def test_what_is_there_is_kept_unless_it_is_for_another_gpu_or_version(toolkit, monkeypatch):
    arguments = ["--head-dims", "64"]
    assert main(arguments) == main(arguments) == 0
    assert built(toolkit) == ["fa2-64 9.0a"]
    assert main([*arguments, "--force"]) == 0
    assert main([*arguments, "--arch", "10.0a"]) == 0
    assert built(toolkit) == ["fa2-64 9.0a", "fa2-64 9.0a", "fa2-64 10.0a"]
    (toolkit / "site" / "flashinfer" / "__init__.py").write_text("__version__ = '0.7.5'\n")
    forget()
    assert main([*arguments, "--arch", "10.0a"]) == 0
    assert len(built(toolkit)) == 4
    known = json.loads((toolkit / "aot" / "dspark.json").read_text())
    assert known == {"fa2-64": {"flashinfer": "0.7.5", "arch": ["10.0a"]}}


def test_windows_have_modules_of_their_own(toolkit):
    assert main(["--head-dims", "64", "--windows"]) == 0
    assert built(toolkit) == ["fa2-64 9.0a", "fa2-64-window 9.0a"]


def test_a_failed_build_leaves_nothing_and_says_what_the_compiler_said(toolkit, capsys):
    (toolkit / "broken").touch()
    assert main(["--head-dims", "64"]) == 1
    assert "fa2-64: nvcc: no such architecture" in capsys.readouterr().err
    assert not list((toolkit / "aot").rglob("*.so")) if (toolkit / "aot").exists() else True


@pytest.mark.parametrize(
    ("missing", "says"), [("ninja", "ninja is not on the PATH"), ("c++", "a C++ compiler"), ("nvcc", "devel")]
)
def test_what_is_missing_is_named_with_its_remedy(toolkit, missing, says, monkeypatch, capsys):
    (toolkit / "cuda" / "bin" / missing).unlink()
    monkeypatch.setattr(warm_kernels, "_USUAL_CUDA", "/nowhere")
    assert main([]) == 1
    assert says in capsys.readouterr().err
    assert not built(toolkit)


def test_without_the_drivers_library_nothing_is_compiled(toolkit, capsys):
    linker = "#!/bin/sh\necho 'cannot find -lcuda' >&2\nexit 1\n"
    (toolkit / "cuda" / "bin" / "c++").write_text(linker)
    assert main([]) == 1
    assert "libcuda (cannot find -lcuda)" in capsys.readouterr().err
    assert not built(toolkit)


def test_without_flashinfer_the_extra_is_named(toolkit, monkeypatch, capsys):
    forget()
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert main([]) == 1
    assert "dspark-server[gpu]" in capsys.readouterr().err


def test_a_toolkit_is_found_by_its_compiler(toolkit, monkeypatch):
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(warm_kernels, "_USUAL_CUDA", "/nowhere")
    assert main(["--head-dims", "64"]) == 0
    assert os.environ["CUDA_HOME"] == str((toolkit / "cuda").resolve())
