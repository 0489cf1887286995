"""Draft models on disk: config.json in DeepSpec's dialect, safetensors without what the target has."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from drafters.chain import ChainModel
from drafters.config import DraftConfig
from drafters.model import DraftModel

AnyModel = DraftModel | ChainModel

#: tensors that a full checkpoint repeats from the target
ALIASED = ("embed_tokens.weight", "lm_head.weight")
_WEIGHTS = "model.safetensors"


def save(
    model: AnyModel,
    folder: Path,
    dtype: torch.dtype = torch.bfloat16,
    feature_scale: torch.Tensor | None = None,
) -> None:
    """Write config and weights without embedding and head.

    `feature_scale` [m * d] is what the features were divided by for this model; `fc` takes that over.
    """
    tensors = dict(model.state_dict())
    if feature_scale is not None and "fc.weight" in tensors:
        tensors["fc.weight"] = tensors["fc.weight"] / feature_scale
    tensors = {name: value.to(dtype).contiguous() for name, value in tensors.items()}
    if model.d2t is not None:
        tensors["d2t"] = model.d2t
    write(folder, model.config, tensors)


def write(folder: Path, config: DraftConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Config and tensors, `d2t` among them as target ids [V']; each file appears whole or not at all."""
    if "d2t" in tensors:
        tensors = {**tensors, "d2t": tensors["d2t"].cpu().long() - torch.arange(len(tensors["d2t"]))}
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{_WEIGHTS}.{os.getpid()}"
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, folder / _WEIGHTS)
    text = json.dumps(config.to_dict(), indent=2) + "\n"
    partial = folder / f".config.json.{os.getpid()}"
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, folder / "config.json")


def load_tensors(folder: Path) -> tuple[DraftConfig, dict[str, torch.Tensor]]:
    """Config and tensors under their names; `d2t` [V'], if there is one, are target ids.

    A file has those as offsets from the draft's ids, as EAGLE and speculators have them. A confidence head
    that is not stored is turned off, never made up. Raises FileNotFoundError or ValueError.
    """
    config = DraftConfig.from_folder(folder)
    tensors: dict[str, torch.Tensor] = {}
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no safetensors")
    for file in files:
        with safe_open(file, framework="pt") as handle:
            for name in handle.keys():  # noqa: SIM118  (not a dict)
                tensors[name] = handle.get_tensor(name)
    tensors.pop("t2d", None)
    if "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
    if config.confidence and "confidence_head.proj.weight" not in tensors:
        config = replace(config, confidence=False)
    return config, tensors


def build(
    config: DraftConfig, embedding: torch.Tensor, head: torch.Tensor, d2t: torch.Tensor | None = None
) -> AnyModel:
    """A model with random weights. embedding [V, d]; head [V', d], the rows that `d2t` [V'] names."""
    kind: type[AnyModel] = DraftModel if config.family == "block" else ChainModel
    return kind(config, embedding, head, d2t)


def load(folder: Path, embedding: torch.Tensor, head: torch.Tensor) -> AnyModel:
    """The model in torch, fp32, over the target's embedding [V, d] and head [V, d]. Raises ValueError."""
    config, tensors = load_tensors(folder)
    d2t = tensors.pop("d2t", None)
    for name in ALIASED:
        tensors.pop(name, None)
    model = build(config, embedding, head if d2t is None else head[d2t], d2t)
    missing, unexpected = model.load_state_dict({k: v.float() for k, v in tensors.items()}, strict=False)
    if missing or unexpected:
        raise ValueError(f"{folder}: missing {missing}, unexpected {unexpected}")
    return model
