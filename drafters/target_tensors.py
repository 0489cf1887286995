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
        read = load_tensors(folder, wanted=lambda name: name.removeprefix("model.") in wanted)
        tensors = {name.removeprefix("model."): value.float() for name, value in read}
        embedding = tensors["embed_tokens.weight"]
        head = embedding if config.tie_embeddings else tensors["lm_head.weight"]
        return cls(config, embedding, head, tensors["norm.weight"], folder)

    def last_layers(self, count: int) -> list[dict[str, torch.Tensor]]:
        """The tensors of the last `count` layers in fp32, by their names within the layer; read anew."""
        ids = range(self.config.num_layers - count, self.config.num_layers)
        layers: list[dict[str, torch.Tensor]] = [{} for _ in ids]
        of_layers = re.compile(rf"(?:model\.)?layers\.({'|'.join(map(str, ids))})\.(.+)")
        for name, value in load_tensors(self.folder, wanted=lambda name: bool(of_layers.fullmatch(name))):
            found = of_layers.fullmatch(name)
            assert found is not None
            layers[int(found[1]) - ids[0]][found[2]] = value.float()
        return layers
