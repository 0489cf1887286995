"""Builds the native kernels beside the Python code; everything else is in pyproject.toml.

The library is plain C++ behind a C interface, loaded through ctypes: any Python version can use it.
Without a compiler the package installs all the same, and the torch executor serves.
"""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = sorted(str(path) for path in Path("engine/native/src").glob("*.cpp"))
X86 = platform.machine().lower() in ("x86_64", "amd64")


class BuildKernels(build_ext):
    """Compiles the sources side by side: they are few, and each takes its time."""

    def build_extension(self, ext: Extension) -> None:
        compile_one = self.compiler.compile

        def compile_all(sources, **options):  # type: ignore[no-untyped-def]
            with ThreadPoolExecutor(max_workers=len(sources)) as pool:
                parts = pool.map(lambda source: compile_one([source], **options), sources)
                return [item for part in parts for item in part]

        self.compiler.compile = compile_all  # type: ignore[method-assign]
        super().build_extension(ext)

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # no PyInit function: this is not a Python module


setup(
    ext_modules=[
        Extension(
            "engine.native._kernels",
            sources=SOURCES,
            depends=sorted(str(path) for path in Path("engine/native/src").glob("*.h")),
            language="c++",
            define_macros=[("DSPARK_X86", "1")] if X86 else [],
            # -ffp-contract=off: a sum must not depend on what the compiler likes to fuse where.
            extra_compile_args=["-std=c++17", "-O3", "-pthread", "-ffp-contract=off", "-fvisibility=hidden"],
            # Its own C++ runtime inside, so that it runs where no compiler was ever installed.
            extra_link_args=["-pthread", "-static-libstdc++", "-static-libgcc"],
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
)
