"""Draft models that come with this package, each trained for one model and only of use beside it.

A folder holds a checkpoint, `target.json` (the SHA-256 of the target's GGUF file), and how it was made:
recipe.json, metrics.csv, curve.png, README.md.
"""

from __future__ import annotations

import json
from pathlib import Path


def shipped_drafter(target_folder: Path) -> Path | None:
    """The checkpoint for the model in this folder, if it was converted from a GGUF file that has one."""
    source = target_folder / "source.json"
    if not source.is_file():
        return None
    digest = json.loads(source.read_text(encoding="utf-8")).get("sha256")
    for target in sorted(Path(__file__).parent.glob("*/target.json")):
        if json.loads(target.read_text(encoding="utf-8"))["sha256"] == digest:
            return target.parent
    return None
