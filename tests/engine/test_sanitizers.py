"""The kernels' tests once more on a build that stops at every bad access and every undefined operation."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "engine" / "native" / "src"
TESTS = (
    *("test_native.py", "test_native_draft.py", "test_broken_weights.py"),
    *("test_noise.py", "test_sampling.py", "test_coupled.py"),
)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_kernels_pass_their_tests_under_address_and_undefined_behaviour_sanitizers(
    tmp_path: Path,
) -> None:
    library = tmp_path / "_kernels.so"
    flags = ["-std=c++17", "-O1", "-g", "-pthread", "-fPIC", "-ffp-contract=off", "-fvisibility=hidden"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-DDSPARK_X86=1"]
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    subprocess.run(["g++", *flags, "-shared", *sources, "-o", str(library)], check=True)
    runtime = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
        for name in ("libasan.so", "libubsan.so", "libstdc++.so")
    ]
    environment = {
        **os.environ,
        "DSPARK_KERNELS": str(library),
        "LD_PRELOAD": " ".join(path.strip() for path in runtime),
        # Python keeps what it likes; torch's exceptions come from a C++ runtime of its own.
        "ASAN_OPTIONS": "detect_leaks=0",
    }
    tests = [str(ROOT / "tests" / "engine" / name) for name in TESTS]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert "skipped" not in run.stdout, "the sanitized kernels were not loaded"
