"""Draft models on disk: config.json in DeepSpec's dialect, safetensors without what the target has."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from drafters.chain import ChainModel
from drafters.config import DraftConfig
from drafters.model import DraftModel
from drafters.stored_tensors import check_shapes, differs, under_our_names
from engine.models.weights import CorruptModel

AnyModel = DraftModel | ChainModel

#: tensors that a full checkpoint repeats from the target, unless it trained its own
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


def load_tensors(
    folder: Path, target_layers: int | None = None
) -> tuple[DraftConfig, dict[str, torch.Tensor]]:
    """Config and tensors under their names; `d2t` [V'], if there is one, are target ids.

    A confidence head that is not stored is turned off, never made up; `target_layers` as in
    `DraftConfig.from_dict`. Raises FileNotFoundError or ValueError.
    """
    config = DraftConfig.from_folder(folder, target_layers)
    stored: dict[str, torch.Tensor] = {}
    files = sorted(Path(folder).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no safetensors")
    for file in files:
        try:
            with safe_open(file, framework="pt") as handle:
                for name in handle.keys():  # noqa: SIM118  (not a dict)
                    stored[name] = handle.get_tensor(name)
        except SafetensorError as error:
            raise CorruptModel(f"{file}: truncated or damaged ({error})") from error
    tensors = under_our_names(config, stored)
    if config.confidence and "confidence_head.proj.weight" not in tensors:
        config = replace(config, confidence=False)
    return config, tensors


def build(
    config: DraftConfig, embedding: torch.Tensor, head: torch.Tensor, d2t: torch.Tensor | None = None
) -> AnyModel:
    """A model with random weights. embedding [V, d]; head [V', d], the rows that `d2t` [V'] names."""
    kind: type[AnyModel] = DraftModel if config.family == "block" else ChainModel
    return kind(config, embedding, head, d2t)


def load(
    folder: Path, embedding: torch.Tensor, head: torch.Tensor, target_layers: int | None = None
) -> AnyModel:
    """The model in torch, fp32, over the target's embedding [V, d] and head [V, d]. Raises ValueError.

    Over the checkpoint's own instead, where it has some that are no copies of the target's.
    """
    config, tensors = load_tensors(folder, target_layers)
    d2t = tensors.pop("d2t", None)
    borrowed = (embedding, head if d2t is None else head[d2t])
    used: list[torch.Tensor] = []
    for name, targets in zip(ALIASED, borrowed, strict=True):
        own = tensors.pop(name, None)
        used.append(own.float() if own is not None and differs(own, targets) else targets)
    model = build(config, used[0], used[1], d2t)
    found = {name: value.float() for name, value in tensors.items()}
    try:
        check_shapes(found, model.state_dict())
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    model.load_state_dict(found)
    return model
