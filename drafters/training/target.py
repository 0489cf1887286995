"""The frozen target: an executor that yields features, and the tensors that a draft model borrows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from drafters.target_tensors import TargetTensors
from engine.batch import BatchItem, DraftBlock, VerificationBatch
from engine.executor import Executor
from engine.models.config import ModelConfig
from engine.models.decoder import FusedDecoder
from engine.models.weights import load_tensors
from engine.native.weights import load_weights
from engine.native_executor import NativeExecutor, runs_natively
from engine.params import SamplingParams
from engine.sampling import SamplingState
from engine.torch_executor import TorchExecutor

_CHUNK = 128  # rows a forward pass


@dataclass(frozen=True)
class TextFeatures:
    """Of every position: chosen layers' outputs [S, m * d], what the head sees [S, d], log-sum-exp [S]."""

    layers: torch.Tensor
    final: torch.Tensor
    lse: torch.Tensor


class Target:
    """Reads a model folder. `longest` bounds the texts."""

    def __init__(self, folder: Path, threads: int, longest: int, quantization: str = "auto") -> None:
        self.config = ModelConfig.from_folder(folder)
        pages = -(-longest // 16)
        self.executor: Executor
        if runs_natively(self.config) is None:
            weights = load_weights(folder, quantization)
            self.executor = NativeExecutor(self.config, weights, pages, threads, longest)
        else:
            model = FusedDecoder(self.config, load_tensors(folder), torch.float32)
            self.executor = TorchExecutor(model, pages)
        self._pages = np.arange(pages, dtype=np.int32)
        self.tensors = TargetTensors.load(folder, self.config)

    @torch.inference_mode()
    def features(self, text: npt.NDArray[np.int32], layers: tuple[int, ...]) -> TextFeatures:
        """One pass over a text, in chunks."""
        parts = list(self._chunks(text, layers))
        return TextFeatures(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _chunks(
        self, text: npt.NDArray[np.int32], layers: tuple[int, ...]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        state = SamplingState(SamplingParams(), 0, frozenset())
        width = self.config.hidden_size
        for start in range(0, len(text), _CHUNK):
            rows = text[start : start + _CHUNK]
            # As if all but the first had been drafted, so that every row's logits come back.
            block = DraftBlock(tuple(rows[1:].tolist()))
            item = BatchItem(
                *(0, text[: start + 1], start, len(rows), self._pages, True, state, len(rows), 0),
                *(block, len(block)),
            )
            output = self.executor.forward(VerificationBatch((item,)), (*layers, self.config.num_layers - 1))
            assert output.features is not None
            last = output.features[:, len(layers) * width :]
            final = torch.nn.functional.rms_norm(last, (width,), self.tensors.norm, self.config.rms_eps)
            yield output.features[:, : len(layers) * width], final, output.logits.logsumexp(-1)
