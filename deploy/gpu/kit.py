"""What travels to the GPU machine and back: model, tokenizer, packages there, and a bundle of results here.

That machine has torch and transformers, no network, and takes little at a time. FlashInfer is too big for it
as it is, so it travels without the sources that its modules were compiled from: with those that
`warm_kernels` built, they are not needed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from deploy.gpu import train
from deploy.gpu.parcel import join, split
from deploy.gpu.parcel import unpack as unpack_model

#: what the engine imports and that machine lacks
PACKAGES = (
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-inspection",
    "typing-extensions",
    "llguidance",
)
#: what FlashInfer imports besides
FLASHINFER_NEEDS = ("apache-tvm-ffi",)
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
#: pip takes only what it is told, not what is older: all that a machine of today runs
_PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in range(39, 16, -1)), "manylinux2014_x86_64")
_NAMED = "batch_prefill"
_RETURNED = 15 << 20
_ROOT = Path(__file__).parents[2]


# ---- before


def pack_tokenizer(pieces: Path) -> None:
    """The default model's tokenizer, beside the prompts."""
    from engine.models.locate import cache_folder, locate_model

    folder = locate_model(None, cache_folder(), print)
    beside = next(pieces.glob("*/prompts.npz")).parent
    for name in _TOKENIZER:
        if (folder / name).exists():
            shutil.copy(folder / name, beside / name)


def pack_packages(folder: Path, python: str) -> None:
    """Wheels for that version of Python, and FlashInfer where it is installed and its modules are built."""
    folder.mkdir(parents=True, exist_ok=True)
    wheels = list(PACKAGES)
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or spec.origin is None:
        print("flashinfer is not installed here: the machine must have it, or step 1 fails")
    else:
        slim(Path(spec.origin).parent, folder / "flashinfer.zip")
        wheels += FLASHINFER_NEEDS
    platforms = [f"--platform={name}" for name in _PLATFORMS]
    pinned = [f"{name}=={importlib.metadata.version(name)}" for name in wheels]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += [f"--python-version={python}", "--implementation=cp", *platforms, f"--dest={folder}", *pinned]
    subprocess.run(command, check=True)


def slim(package: Path, target: Path) -> None:
    """FlashInfer with its compiled modules and without what they were compiled from.

    Raises ValueError if none have been compiled.
    """
    aot = package / "data" / "aot"
    if not any(aot.glob("*/*.so")):
        raise ValueError(f"{aot} holds no modules: run `python -m deploy.gpu.warm_kernels` first")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as archive:
        for file in sorted(package.rglob("*")):
            name = file.relative_to(package)
            if file.is_file() and _travels(name):
                archive.write(file, Path("flashinfer") / name)
        for info in package.parent.glob("flashinfer_python-*.dist-info"):
            archive.write(info / "METADATA", Path(info.name) / "METADATA")


def _travels(name: Path) -> bool:
    parts = name.parts
    if "__pycache__" in parts:
        return False
    if parts[0] != "data" or parts[1] == "aot":
        return True
    return name.suffix == ".jinja" or name.stem.startswith(
        _NAMED
    )  # read when a module is named, not compiled


def sizes(pieces: Path) -> None:
    for folder in sorted(path for path in pieces.iterdir() if path.is_dir()):
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        print(f"{folder}: {size / (1 << 20):.1f} MiB")


# ---- on the GPU machine


def unpack(pieces: Sequence[Path], work: Path) -> Path:
    """Lays out work/model and work/site, the packages that were brought; returns the latter."""
    model, site = work / "model", work / "site"
    if not (model / "config.json").exists():
        rest = next(piece for piece in pieces if (piece / "prompts.npz").exists())
        (work / "blocks.bin").write_bytes(join(list(pieces), "blocks"))
        unpack_model(work / "blocks.bin", rest / "config.json", model)
        for name in _TOKENIZER:
            if (rest / name).exists():
                shutil.copy(rest / name, model / name)
    site.mkdir(parents=True, exist_ok=True)
    for archive in (file for piece in pieces for file in [*piece.glob("*.whl"), *piece.glob("*.zip")]):
        with zipfile.ZipFile(archive) as opened:
            opened.extractall(site)
    if not _installed("dspark-server"):  # run from its sources: its version is asked for all the same
        info = site / "dspark_server-0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: dspark-server\nVersion: 0\n")
    return site


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def environment(site: Path | None) -> Mapping[str, str]:
    """For a step's process. Compiled modules are taken as they are: that machine could not compile others."""
    paths = [str(_ROOT), *([str(site)] if site else []), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    extra = {"PYTHONPATH": os.pathsep.join(path for path in paths if path), "PYTHONUNBUFFERED": "1"}
    if site is not None and (site / "flashinfer" / "data" / "aot").is_dir():
        extra |= {"FLASHINFER_DISABLE_JIT": "1", "FLASHINFER_NO_DOWNLOAD": "1"}
    return {**os.environ, **extra}


# ---- and back


def bundle(folder: Path, out: Path) -> None:
    """All of `folder` as out/bundle.0, .1, ..., of 15 MiB each; nothing if there is no such folder."""
    if not folder.is_dir():
        return
    for old in out.glob("bundle.*"):
        old.unlink()
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for file in sorted(folder.iterdir()):
            archive.add(file, file.name)
    split(packed.getvalue(), out, "bundle", _RETURNED)


def unbundle(out: Path, draft: Path) -> int:
    """The draft model from a run's bundle; returns the exit code."""
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(fileobj=io.BytesIO(join([out], "bundle"))) as archive:
            archive.extractall(scratch, filter="data")
        return train.main(["join", scratch, str(draft)])
