"""The seam between deciding and computing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from engine.batch import ForwardOutput, VerificationBatch
from engine.models.config import ModelConfig


class Executor(Protocol):
    """Runs the target over latched batches, on K/V pools that it owns. Called by the worker only."""

    config: ModelConfig
    page_size: int
    num_pages: int

    def forward(self, batch: VerificationBatch, feature_layers: tuple[int, ...] = ()) -> ForwardOutput:
        """Write K/V of all rows to their pages; return logits of `batch.logit_rows()`, features if asked."""

    def describe(self) -> Mapping[str, Any]:
        """Name, device, dtype, threads: what `/version` and the start line say."""
