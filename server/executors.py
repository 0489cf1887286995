"""Which executor runs a model, how it is built, and how much it may hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from drafters.chain_drafter import ChainDrafter
from drafters.device_blocks import DeviceDraftBlocks
from drafters.hybrid import HybridDrafter
from engine.cuda.attention import AttentionBackend, AttentionShape
from engine.cuda.executor import CudaExecutor
from engine.cuda.flashinfer import FlashInferBackend, FlashInferMissing
from engine.cuda.graphs import CudaGraphs
from engine.cuda.laps import CudaLaps
from engine.cuda.memory import measured, pages_for
from engine.cuda.sdpa import SdpaBackend
from engine.cuda.stream import CudaStream
from engine.cuda.verification import DeviceVerification
from engine.drafter import Drafter
from engine.executor import Executor
from engine.machine import has_fast_bf16, usable_cores, usable_memory
from engine.models.base import Model
from engine.models.config import ModelConfig
from engine.models.decoder import FusedDecoder
from engine.models.transformers_model import TransformersModel
from engine.models.weights import load_tensors
from engine.native.loader import supported
from engine.native.weights import load_weights
from engine.native_executor import NativeExecutor, runs_natively
from engine.profile import Profiler
from engine.torch_executor import TorchExecutor
from engine.worker import Worker
from server.settings import Settings

Progress = Callable[[str], None]

PAGE_SIZE = 16
_KV_SHARE, _KV_MOST = 0.4, 4 << 30
_REHEARSAL_PAGES = 64
#: rows a step: bounds how long a long prompt can hold up a stream, at little cost in throughput
_TOKEN_BUDGET = {"cuda": 2048, "native": 128, "torch": 128}
#: head sizes that FlashInfer's kernels are made for
_HEAD_DIMS = (64, 128, 256)


class BadSettings(ValueError):
    """Settings that are fine each, but not together or not with this model."""


Kind = Literal["cuda", "native", "torch"]


def chosen(settings: Settings, config: ModelConfig) -> Kind:
    """What runs this model. Raises BadSettings if an executor must and cannot."""
    if settings.executor in ("auto", "cuda"):
        reason = _not_on_cuda(config)
        if reason is None and (settings.executor == "cuda" or settings.quantization != "gguf"):
            return "cuda"
        if settings.executor == "cuda":
            raise BadSettings(f"--executor cuda: {reason}")
    if settings.executor == "torch":
        return "torch"
    reason = runs_natively(config)
    if reason is None and settings.dtype == "float32":
        reason = "it computes from bf16 or quantised weights, not from float32"
    if reason is not None and settings.executor == "native":
        raise BadSettings(f"--executor native: {reason}")
    # Plain C++ without vector instructions runs anywhere, but torch is faster.
    native = reason is None and (settings.executor == "native" or supported()[0] != "portable")
    return "native" if native else "torch"


def _not_on_cuda(config: ModelConfig) -> str | None:
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if not config.fused:
        return f"{config.architecture} does not run on the fused decoder"
    return None


def token_budget(settings: Settings, config: ModelConfig) -> int:
    """Rows a step. Raises BadSettings if not even the anchors of all sequences fit."""
    usual = max(_TOKEN_BUDGET[chosen(settings, config)], settings.max_num_seqs)
    budget = settings.max_num_batched_tokens or usual
    if budget < settings.max_num_seqs:
        raise BadSettings(
            f"--max-num-batched-tokens {budget} must be at least --max-num-seqs {settings.max_num_seqs}"
        )
    return budget


def build_executor(
    settings: Settings, config: ModelConfig, folder: Path, progress: Progress
) -> tuple[Executor, int]:
    """The executor that the settings ask for, with the context limit. A CUDA executor is `fit` later."""
    kind = chosen(settings, config)
    if kind == "cuda":
        longest = _longest(settings, config)
        return _cuda_executor(settings, config, folder, _REHEARSAL_PAGES, longest, progress), longest
    if settings.executor == "auto" and torch.cuda.is_available():
        progress(f"{config.architecture} runs on the CPU, not on the GPU")
    dtype = torch.bfloat16 if kind == "native" else _dtype(settings.dtype)
    pages = settings.num_pages or _affordable_pages(settings, config, dtype)
    max_model_len = _context(settings, config, pages)
    if kind == "torch":
        return TorchExecutor(_model(config, folder, dtype), pages, PAGE_SIZE, dtype), max_model_len
    executor = _native_executor(settings, config, folder, pages, max_model_len)
    torch.set_num_threads(1)  # the kernels' threads do the work; torch is left with single rows
    return executor, max_model_len


def build_pair(
    settings: Settings, config: ModelConfig, folder: Path, tokens: int, progress: Progress
) -> tuple[Executor, Executor]:
    """An fp32 executor in torch and the one that the settings ask for, each for so many tokens."""
    pages = -(-tokens // PAGE_SIZE)
    reference = TorchExecutor(_model(config, folder, torch.float32), pages, PAGE_SIZE, torch.float32)
    kind = chosen(settings, config)
    if kind == "cuda":
        return reference, _cuda_executor(settings, config, folder, pages, tokens, progress)
    if kind == "native":
        return reference, _native_executor(settings, config, folder, pages, tokens)
    dtype = _dtype(settings.dtype)
    return reference, TorchExecutor(_model(config, folder, dtype), pages, PAGE_SIZE, dtype)


def build_worker(executor: Executor, drafter: Drafter | None) -> Worker:
    """Verification and the clock are where the executor is."""
    if isinstance(executor, CudaExecutor):
        return Worker(executor, drafter, DeviceVerification(executor.stream), CudaLaps)
    return Worker(executor, drafter)


def fit(
    worker: Worker, settings: Settings, config: ModelConfig, gamma: int, block: int, progress: Progress
) -> int | None:
    """Give a CUDA executor and its drafter their pages, and record their graphs; returns the context limit.

    `gamma` is how many tokens a model drafts, `block` how many a block may have. None: nothing to do.
    """
    executor = worker.executor
    if not isinstance(executor, CudaExecutor):
        return None
    blocks = _device_blocks(worker.drafter)
    page_bytes = executor.pool.page_bytes + (blocks.pool.page_bytes if blocks is not None else 0)
    longest = _longest(settings, config)
    useful = -(-longest // PAGE_SIZE) * settings.max_num_seqs
    budget = token_budget(settings, config)
    verified = min(budget, settings.max_num_seqs * (1 + block))
    pages = settings.num_pages
    if pages is None and settings.kv_cache_memory:
        pages = max(1, int(settings.kv_cache_memory * (1 << 30)) // page_bytes)
    if pages is None:
        profiler = Profiler(worker, config.vocab_size, executor.num_pages, PAGE_SIZE, gamma, block)
        usage = measured(
            executor.stream.device,
            lambda: profiler.rehearse(verified, min(budget, longest), settings.max_num_seqs),
        )
        pages = min(useful, pages_for(usage, settings.gpu_memory_utilization, page_bytes))
        progress(
            f"{usage.peak / 2**30:.1f} GiB beside the KV cache, {pages * page_bytes / 2**30:.1f} GiB for it"
        )
        if not pages:
            share = settings.gpu_memory_utilization
            raise BadSettings(f"--gpu-memory-utilization {share} leaves no memory for the KV cache")
    executor.resize(pages)
    if blocks is not None:
        blocks.pool.resize(pages)
    elif isinstance(drafter := _model_drafter(worker.drafter), ChainDrafter):
        drafter.resize(pages)
    max_model_len = _context(settings, config, pages)
    layers = worker.drafter.feature_layers if worker.drafter is not None else ()
    executor.capture(verified, settings.max_num_seqs, layers, progress)
    if blocks is not None:
        blocks.capture(settings.max_num_seqs, max_model_len, progress)
    return max_model_len


def _device_blocks(drafter: Drafter | None) -> DeviceDraftBlocks | None:
    blocks = getattr(_model_drafter(drafter), "blocks", None)
    return blocks if isinstance(blocks, DeviceDraftBlocks) else None


def _model_drafter(drafter: Drafter | None) -> Drafter | None:
    return drafter.model if isinstance(drafter, HybridDrafter) else drafter


def _cuda_executor(
    settings: Settings, config: ModelConfig, folder: Path, pages: int, positions: int, progress: Progress
) -> CudaExecutor:
    stream = CudaStream()
    dtype = torch.float32 if settings.dtype == "float32" else torch.bfloat16
    positions = max(
        positions, _REHEARSAL_PAGES * PAGE_SIZE
    )  # which go as far as there are pages, and no further
    model = FusedDecoder(config, load_tensors(folder, stream.device), dtype, stream.device, positions)
    torch.cuda.empty_cache()  # the parts that fused weights were made of
    attention = _attention(stream, config, dtype, progress)
    return CudaExecutor(model, pages, stream, attention, CudaGraphs(stream.device), PAGE_SIZE)


def _attention(
    stream: CudaStream, config: ModelConfig, dtype: torch.dtype, progress: Progress
) -> AttentionBackend:
    """FlashInfer, or torch where that cannot be: which is said, since it is much slower."""
    if dtype == torch.float32:
        reason = "FlashInfer does not compute in float32"
    elif config.head_dim not in _HEAD_DIMS:
        reason = f"FlashInfer has no kernels for heads of {config.head_dim}"
    else:
        try:
            backend = FlashInferBackend(stream)
            backend.check(AttentionShape.of(config, PAGE_SIZE, dtype))
            return backend
        except FlashInferMissing as error:
            reason = str(error)
    progress(f"{reason}: attention runs in torch, request by request and without CUDA graphs, which is slow")
    return SdpaBackend()


def _native_executor(
    settings: Settings, config: ModelConfig, folder: Path, pages: int, positions: int
) -> NativeExecutor:
    weights = load_weights(folder, settings.quantization)
    return NativeExecutor(config, weights, pages, settings.threads or usable_cores(), positions)


def _dtype(name: str) -> torch.dtype:
    if name == "auto":
        return torch.bfloat16 if has_fast_bf16() else torch.float32
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def _model(config: ModelConfig, folder: Path, dtype: torch.dtype) -> Model:
    if config.fused:
        return FusedDecoder(config, load_tensors(folder), dtype)
    return TransformersModel.load(folder, dtype, config=config)


def _affordable_pages(settings: Settings, config: ModelConfig, dtype: torch.dtype) -> int:
    """Pages for --kv-cache-memory, or for a share of what is left, but not more than could ever be used."""
    page = 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize * PAGE_SIZE
    if settings.kv_cache_memory:
        return max(1, int(settings.kv_cache_memory * (1 << 30)) // page)
    useful = -(-_longest(settings, config) // PAGE_SIZE) * settings.max_num_seqs
    return max(1, min(useful, int(min(_KV_MOST, _KV_SHARE * usable_memory())) // page))


def _longest(settings: Settings, config: ModelConfig) -> int:
    if settings.max_model_len and settings.max_model_len > config.max_position:
        raise BadSettings(
            f"--max-model-len {settings.max_model_len} exceeds the model's {config.max_position} positions"
        )
    return settings.max_model_len or config.max_position


def _context(settings: Settings, config: ModelConfig, pages: int) -> int:
    """The context limit: a single sequence must always fit, or it could never finish."""
    longest = _longest(settings, config)
    if longest <= pages * PAGE_SIZE:
        return longest
    if settings.max_model_len:
        raise BadSettings(
            f"--max-model-len {longest} needs {-(-longest // PAGE_SIZE)} pages, but the KV cache has {pages}"
        )
    return pages * PAGE_SIZE
