"""What the engine asks of a target model: a forward over packed rows that leaves attention to its caller."""

from __future__ import annotations

from typing import Protocol

import torch

from engine.models.config import ModelConfig


class Attend(Protocol):
    """Paged attention of one layer over the packed rows of a batch; the executor hands it to the model.

    q [T, Hq, D], k and v [T, Hk, D] (rotated where the model rotates) -> [T, Hq, D]. Writes k and v into
    the layer's pages first. `window` counts the keys a query sees, itself included (None: all);
    `softcap` is Gemma2's tanh cap on scores (None: off).
    """

    def __call__(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor: ...


class Model(Protocol):
    """A dense decoder. T rows of any number of sequences are packed one after another."""

    config: ModelConfig

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        attend: Attend,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """tokens, positions [T] int64 -> (final-normed hidden [T, d], features [T, m*d] or None).

        Feature layer i is the raw output of decoder layer i (0-based; -1: the embedding output),
        concatenated in the order given (DSpark, section 2.2; the last layer is not allowed).
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, d] -> [n, V], in fp32 at least (fp64 when the model runs in fp64)."""
