"""What every step of `make gpu-check` is told, and how it shows figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from server.wiring import Parts

_SHIPPED = Path(__file__).parents[2] / "drafters" / "shipped" / "SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class StepOptions:
    """`work` holds model/ and scratch files, `pieces` what was brought; `seconds` is what the step may take.

    `dry`: toy sizes on a CPU, with executor torch and stand-ins, to try the script itself.
    """

    work: Path
    pieces: tuple[Path, ...]
    seconds: float
    dry: bool = False

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def drafts(self) -> dict[str, Any]:
        """The speculative configuration: the shipped draft model, or one that lies beside a toy model."""
        own = self.work / "draft"
        return {"method": "dspark", "model": str(own if own.is_dir() else _SHIPPED)}

    def parts(self, observer: Any, model: Path | None = None, **settings: Any) -> Parts:
        """The server's own engine around a model folder (default: the one that was brought)."""
        from server.settings import Settings
        from server.wiring import build_parts

        given = {
            "model": str(model or self.work / "model"),
            "executor": "torch" if self.dry else "cuda",
            "cache_dir": str(self.work / "cache"),
            **({"threads": 1} if self.dry else {}),
            **settings,
        }
        return build_parts(Settings.model_validate(given), observer, lambda line: print(line, flush=True))


def shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def table_of(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns, aligned."""
    texts = [list(row) for row in (header, *rows)]
    widths = [max(len(row[i]) for row in texts) for i in range(len(header))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in texts)
    return "\n".join(line.rstrip() for line in lines)
