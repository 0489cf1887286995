"""What a draft model takes from its target: embedding and head; for training, final norm and layers too."""

from __future__ import annotations

import re
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
    folder: Path

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
        return cls(config, embedding, head, tensors["norm.weight"], folder)

    def last_layers(self, count: int) -> list[dict[str, torch.Tensor]]:
        """The tensors of the last `count` layers in fp32, by their names within the layer; read anew."""
        first = self.config.num_layers - count
        layers: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
        for name, value in load_tensors(self.folder):
            found = re.fullmatch(r"(?:model\.)?layers\.(\d+)\.(.+)", name)
            if found is not None and int(found[1]) >= first:
                layers[int(found[1]) - first][found[2]] = value.float()
        return layers
