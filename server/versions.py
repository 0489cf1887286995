"""Versions of the packages that matter in a bug report, read without importing any of them."""

from __future__ import annotations

import platform
from importlib import metadata

_SHOWN = ("dspark-server", "torch", "transformers", "tokenizers", "fastapi", "uvicorn", "pydantic")


def versions() -> dict[str, str]:
    """Package name to version, Python first."""
    found = {"python": platform.python_version()}
    for name in _SHOWN:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found
