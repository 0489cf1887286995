"""From a draft model's folder to a drafter beside a target that is loaded already."""

from __future__ import annotations

import hashlib
from pathlib import Path

from drafters.blocks import DraftBlocks, TorchDraftBlocks
from drafters.checkpoint import load
from drafters.config import DraftConfig
from drafters.dspark import DSparkDrafter
from drafters.native_blocks import NativeDraftBlocks
from drafters.target_tensors import TargetTensors
from engine.executor import Executor
from engine.models.config import ModelConfig
from engine.native.weights import Rows, load_weights
from engine.native_executor import NativeExecutor


def load_dspark(
    folder: Path, executor: Executor, target_folder: Path, max_positions: int, quantization: str = "auto"
) -> DSparkDrafter:
    """A DSpark or DFlash drafter on the target's own kind of executor.

    Raises FileNotFoundError, or ValueError for a checkpoint that does not fit the target.
    """
    config, target = DraftConfig.from_folder(folder), ModelConfig.from_folder(target_folder)
    _check(config, target)
    blocks: DraftBlocks
    if isinstance(executor, NativeExecutor):
        name = "embed_tokens.weight" if target.tie_embeddings else "lm_head.weight"
        head = load_weights(target_folder, quantization)[name]
        assert isinstance(head, Rows)
        native = NativeDraftBlocks(folder, executor, head, max_positions)
        blocks, config, d2t = native, native.config, native.d2t
    else:
        tensors = TargetTensors.load(target_folder, target)
        model = load(folder, tensors.embedding, tensors.head)
        blocks = TorchDraftBlocks(model, executor.num_pages, executor.page_size)
        config, d2t = model.config, model.d2t
    return DSparkDrafter(config, blocks, _identity(folder), d2t)


def _check(config: DraftConfig, target: ModelConfig) -> None:
    if config.hidden_size != target.hidden_size or config.layers.vocab_size != target.vocab_size:
        raise ValueError(
            f"the draft model is for a target of width {config.hidden_size} and {config.layers.vocab_size} "
            f"tokens, this one has {target.hidden_size} and {target.vocab_size}"
        )
    if not all(-1 <= layer < target.num_layers - 1 for layer in config.target_layer_ids):
        raise ValueError(f"the draft model reads layers {config.target_layer_ids}, which are not all inside")


def _identity(folder: Path) -> str:
    """Changes with the weights: pages hold K/V that only this draft model understands."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return f"dspark-{digest.hexdigest()}"
