"""From a draft model's folder to a drafter beside a target that is loaded already."""

from __future__ import annotations

import hashlib
from pathlib import Path

from drafters.backbone import Rotary
from drafters.blocks import DraftBlocks, TorchDraftBlocks
from drafters.chain import ChainModel
from drafters.chain_drafter import ChainDrafter
from drafters.checkpoint import load
from drafters.config import DraftConfig
from drafters.device_blocks import DeviceDraftBlocks
from drafters.dspark import DSparkDrafter
from drafters.hybrid import ModelDrafter
from drafters.model import DraftModel
from drafters.native_blocks import NativeDraftBlocks
from drafters.target_tensors import TargetTensors
from engine.cuda.executor import CudaExecutor
from engine.executor import Executor
from engine.models.config import ModelConfig
from engine.native.weights import Rows, load_weights
from engine.native_executor import NativeExecutor


def load_drafter(
    folder: Path, executor: Executor, target_folder: Path, max_positions: int, quantization: str = "auto"
) -> ModelDrafter:
    """The drafter that a folder holds: DSpark and DFlash on the target's kind of executor, chains in torch.

    Raises FileNotFoundError, or ValueError for a checkpoint that does not fit the target.
    """
    target = ModelConfig.from_folder(target_folder)
    config = DraftConfig.from_folder(folder, target.num_layers)
    _check(config, target)
    if config.family != "block":
        return _chain(folder, executor, target_folder, target)
    blocks: DraftBlocks
    if isinstance(executor, NativeExecutor):
        name = "embed_tokens.weight" if target.tie_embeddings else "lm_head.weight"
        head = load_weights(target_folder, quantization)[name]
        assert isinstance(head, Rows)
        native = NativeDraftBlocks(
            folder,
            executor,
            head,
            max_positions,
            small=head.format != "BF16",
            borrowed=lambda: TargetTensors.load(target_folder, target),
        )
        blocks, config, d2t = native, native.config, native.d2t
    elif isinstance(executor, CudaExecutor):
        on_device = _device_blocks(folder, executor, target_folder, target)
        blocks, config, d2t = on_device, on_device.model.config, on_device.model.d2t
    else:
        tensors = TargetTensors.load(target_folder, target)
        model = load(folder, tensors.embedding, tensors.head, target.num_layers)
        assert isinstance(model, DraftModel)
        blocks = TorchDraftBlocks(model, executor.num_pages, executor.page_size)
        config, d2t = model.config, model.d2t
    return DSparkDrafter(config, blocks, executor.page_size, _identity(folder), d2t)


def _device_blocks(
    folder: Path, executor: CudaExecutor, target_folder: Path, target: ModelConfig
) -> DeviceDraftBlocks:
    """In the target's type, with its embedding and head, over pages of its own."""
    embedding, head = executor.model.embedding, executor.model.head_weight
    if head is None:  # a CPU keeps it in another form
        head = TargetTensors.load(target_folder, target).head.to(embedding)
    model = load(folder, embedding, head)
    assert isinstance(model, DraftModel)
    confidence = model.confidence_head
    exact = None if confidence is None else {k: v.clone() for k, v in confidence.state_dict().items()}
    model = model.to(embedding.device, embedding.dtype)
    if confidence is not None and exact is not None:  # rounded, it would not be what was calibrated
        confidence.float().load_state_dict(exact)
    model.rotary = Rotary(model.config.layers).to(embedding.device)  # angles need more than 16 bits
    return DeviceDraftBlocks(
        model, executor.num_pages, executor.page_size, executor.stream, executor.attention, executor.graphs
    )


def _chain(folder: Path, executor: Executor, target_folder: Path, target: ModelConfig) -> ChainDrafter:
    tensors = TargetTensors.load(target_folder, target)
    model = load(folder, tensors.embedding, tensors.head, target.num_layers)
    assert isinstance(model, ChainModel)
    norm = tensors.norm if model.config.family == "mtp" else None
    return ChainDrafter(model, _identity(folder), executor.num_pages, executor.page_size, norm)


def _check(config: DraftConfig, target: ModelConfig) -> None:
    if config.hidden_size != target.hidden_size or config.layers.vocab_size != target.vocab_size:
        raise ValueError(
            f"the draft model is for a target of width {config.hidden_size} and {config.layers.vocab_size} "
            f"tokens, this one has {target.hidden_size} and {target.vocab_size}"
        )
    # The last layer's output is MTP's, and nobody else's: others may know it with the final norm applied.
    end = target.num_layers - (config.family != "mtp")
    if not all(-1 <= layer < end for layer in config.target_layer_ids):
        raise ValueError(f"the draft model reads layers {config.target_layer_ids}, which are not all inside")


def _identity(folder: Path) -> str:
    """Changes with the weights: pages hold K/V that only this draft model understands."""
    digest = hashlib.blake2b(digest_size=8)
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    return f"draft-{digest.hexdigest()}"
