"""FlashInfer's kernels, compiled ahead of time: for images without compiler and machines without network.

    python -m deploy.gpu.warm_kernels [--arch 9.0a ...] [--head-dims 64 128] [--windows]

Builds the modules that the CUDA executor calls (paged prefill, fa2, bf16, int32 indices) and copies them to
where FlashInfer looks before it compiles anything: data/aot in its own folder. No GPU is needed, but nvcc,
a C++ compiler and ninja are. A module takes minutes. Set FLASHINFER_DISABLE_JIT=1 where the result is used: a
missing module then fails at start, not at the first request.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ARCHITECTURES = ("9.0a",)
HEAD_DIMS = (64, 128)
_MANIFEST = "dspark.json"
_USUAL_CUDA = "/usr/local/cuda"
_NO_POSITIONS = 0  # rotary embeddings are applied before


class CannotCompile(RuntimeError):
    """Something that compiling needs is missing; the message says what."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    options = _parser().parse_args(argv)
    try:
        home = cuda_home()
        check_driver(home)
        os.environ["CUDA_HOME"] = str(home)
        os.environ.pop("FLASHINFER_DISABLE_JIT", None)
        os.environ["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(options.arch)  # read when flashinfer is imported
        warm(options.arch, options.head_dims, options.windows, options.force)
    except (CannotCompile, OSError) as error:
        print(f"warm_kernels: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--arch",
        nargs="+",
        default=os.environ.get("FLASHINFER_CUDA_ARCH_LIST", "").split() or list(ARCHITECTURES),
        help="compute capabilities, such as 8.0 9.0a (default: FLASHINFER_CUDA_ARCH_LIST, else 9.0a)",
    )
    parser.add_argument("--head-dims", type=int, nargs="+", default=list(HEAD_DIMS))
    parser.add_argument("--windows", action="store_true", help="modules for sliding windows as well")
    parser.add_argument("--force", action="store_true", help="build what is there already once more")
    return parser


def cuda_home() -> Path:
    """The CUDA toolkit whose nvcc is used. Raises CannotCompile, saying what is missing."""
    for tool, package in (("ninja", "pip install ninja"), ("c++", "a C++ compiler, such as g++")):
        if shutil.which(tool) is None:
            raise CannotCompile(f"{tool} is not on the PATH; it needs {package}")
    for place in (os.environ.get("CUDA_HOME"), _USUAL_CUDA):
        if place and (Path(place) / "bin" / "nvcc").is_file():
            return Path(place)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise CannotCompile(
            "nvcc is not here (neither in $CUDA_HOME, nor in /usr/local/cuda, nor on the PATH): run this in "
            "an image with CUDA's compiler, such as nvidia/cuda:13.0.1-devel-ubuntu24.04"
        )
    return Path(nvcc).resolve().parent.parent


def check_driver(home: Path) -> None:
    """Modules are linked with the driver's library; without it, minutes of compiling would be for nothing.

    Raises CannotCompile if the linker finds neither that nor the toolkit's stub.
    """
    folders = [f"-L{home / lib / stubs}" for lib in ("lib64", "lib") for stubs in ("", "stubs")]
    command = ["c++", "-shared", "-x", "c++", os.devnull, *folders, "-lcuda", "-o", os.devnull]
    linked = subprocess.run(command, capture_output=True, text=True, check=False)
    if linked.returncode:
        said = linked.stderr.strip().splitlines() or ["c++ failed"]
        raise CannotCompile(
            f"nothing can be linked with the driver's library, libcuda ({said[0]}): neither the driver nor "
            f"its stub is here; the toolkit's devel packages hold one, below {home / 'lib64' / 'stubs'}"
        )


def warm(arch: Sequence[str], head_dims: Sequence[int], windows: bool, force: bool) -> list[Path]:
    """Build and place all modules; returns their files. Raises CannotCompile."""
    try:
        import flashinfer
        from flashinfer.jit import env
    except (ImportError, OSError) as error:  # it writes to its own folders when it is imported
        raise CannotCompile(
            f"flashinfer cannot be imported ({error}): pip install 'dspark-server[gpu]'"
        ) from error
    manifest = Path(env.FLASHINFER_AOT_DIR) / _MANIFEST
    known = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
    made_for = {"flashinfer": flashinfer.__version__, "arch": sorted(arch)}
    placed = []
    for spec in modules(head_dims, windows):
        target = Path(spec.aot_path)
        if not force and target.is_file() and known.get(spec.name) == made_for:
            print(f"{spec.name}: there already", flush=True)
        else:
            _build(spec, target)
            known[spec.name] = made_for
            manifest.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        placed.append(target)
    return placed


def modules(head_dims: Sequence[int], windows: bool) -> Iterator[Any]:
    """FlashInfer's specifications of what the executor calls, in the order of their worth."""
    import torch
    from flashinfer.jit.attention.modules import _gen_batch_prefill_primary_module as primary

    # The wrapper loads this variant (equal strides of K and V) by a name of its own. Nothing public makes it.
    kinds = (torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.int32)  # queries, K/V, output, indices
    for window, dim in itertools.product((False, True) if windows else (False,), head_dims):
        yield primary("fa2", *kinds, dim, dim, _NO_POSITIONS, window, False, False)


def _build(spec: Any, target: Path) -> None:
    print(f"{spec.name}: compiling", flush=True)
    begun = time.monotonic()
    try:
        spec.build(verbose=False)
    except RuntimeError as error:  # ninja's, with the compiler's output
        raise CannotCompile(f"{spec.name}: {error}") from error
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}")
    shutil.copyfile(spec.jit_library_path, partial)
    os.replace(partial, target)
    size = target.stat().st_size / (1 << 20)
    print(f"{spec.name}: {time.monotonic() - begun:.0f} s, {size:.1f} MiB", flush=True)


if __name__ == "__main__":
    sys.exit(main())
