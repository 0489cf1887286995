"""What a draft model takes from its target: the embedding, the head, and for training the final norm."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from engine.models.config import ModelConfig
from engine.models.weights import load_tensors


@dataclass(frozen=True)
class TargetTensors:
    """fp32: embedding [V, d], head [V, d] (the embedding again where the target ties them), norm [d]."""

    config: ModelConfig
    embedding: torch.Tensor
    head: torch.Tensor
    norm: torch.Tensor

    @classmethod
    def load(cls, folder: Path, config: ModelConfig) -> TargetTensors:
        """Raises FileNotFoundError, CorruptModel or KeyError for a checkpoint without them."""
        wanted = {"embed_tokens.weight", "lm_head.weight", "norm.weight"}
        tensors = {
            name.removeprefix("model."): value.float()
            for name, value in load_tensors(folder)
            if name.removeprefix("model.") in wanted
        }
        embedding = tensors["embed_tokens.weight"]
        head = embedding if config.tie_embeddings else tensors["lm_head.weight"]
        return cls(config, embedding, head, tensors["norm.weight"])
