"""The CPU executor: a whole forward pass in one call of the C++ kernels, with the interpreter lock released.

Batch-invariant by construction: a row's bits depend on the row and its context alone, so greedy and seeded
texts are the same with speculation on and off, alone and in a crowd, on one thread and on many.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from engine.batch import ForwardOutput, VerificationBatch
from engine.models.config import ModelConfig
from engine.native.loader import check, supported
from engine.native.model import NativeModel
from engine.native.weights import Weights

PAGE_SIZE = 16  # fixed in the kernels


def runs_natively(config: ModelConfig) -> str | None:
    """None if the kernels can run this model here, else why not."""
    if not supported():
        return "the kernels were not built (no C++ compiler at installation?)"
    if not config.fused:
        return f"{config.architecture} is not one of the kernels' architectures"
    if any(size % 32 for size in (config.head_dim, config.hidden_size, config.intermediate_size)):
        return "a head, hidden or intermediate size is no multiple of 32"
    return None


class NativeExecutor:
    """Owns the packed weights and the K/V pools, both on the kernels' side.

    `kernels` names the instruction set (None: the best that this machine runs).
    Raises NativeError when the library is missing or refuses the model.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        num_pages: int,
        threads: int,
        max_positions: int,
        kernels: str | None = None,
    ) -> None:
        self.config = config
        self.page_size = PAGE_SIZE
        self.num_pages = num_pages
        self.threads = threads
        self.model = NativeModel(config, config.vocab_size, num_pages, threads, max_positions, kernels)
        self._staging = np.empty(1024, dtype=np.int32)
        self.model.set_layers(weights)
        self.model.set_embedding(weights)
        self.model.set_head(weights)

    def forward(self, batch: VerificationBatch, feature_layers: tuple[int, ...] = ()) -> ForwardOutput:
        """See `Executor.forward`."""
        items = batch.items
        held, rows = sum(len(item.pages) for item in items), batch.rows
        wanted = sum(item.logit_rows for item in items)
        spans_at, pages_at = 0, 3 * len(items)
        tokens_at, wanted_at = pages_at + held, pages_at + held + rows
        if wanted_at + wanted > len(self._staging):
            self._staging = np.empty(2 * (wanted_at + wanted), dtype=np.int32)
        # One buffer that lives on, filled in place: between two passes the caches are cold, and every object
        # that is made here costs.
        staging = self._staging
        page, token, row, logit = pages_at, tokens_at, 0, wanted_at
        for item in items:
            staging[spans_at : spans_at + 3] = item.count, item.start, page - pages_at
            staging[page : page + len(item.pages)] = item.pages
            known = item.count - item.verify
            staging[token : token + known] = item.history[item.start : item.start + known]
            if item.verify and item.draft is not None:
                staging[token + known : token + item.count] = item.draft.tokens[: item.verify]
            row += item.count
            if own := item.logit_rows:
                staging[logit : logit + own] = range(row - own, row)
                logit += own
            spans_at, page, token = spans_at + 3, page + len(item.pages), token + item.count
        layers = (ctypes.c_int32 * len(feature_layers))(*feature_layers)
        logits = torch.empty((wanted, self.config.vocab_size))
        features = torch.empty((rows, len(layers) * self.config.hidden_size)) if feature_layers else None
        base = staging.ctypes.data
        check(
            self.model.lib.dspark_forward(
                self.model.handle,
                len(items),
                base,
                base + 4 * pages_at,
                base + 4 * tokens_at,
                wanted,
                base + 4 * wanted_at,
                logits.data_ptr(),
                len(layers),
                layers,
                None if features is None else features.data_ptr(),
                1,
                None,
            )
        )
        return ForwardOutput(logits, features)

    def describe(self) -> Mapping[str, Any]:
        """See `Executor.describe`."""
        return {
            "executor": "native",
            "device": "cpu",
            "dtype": "+".join(sorted(self.model.formats)).lower(),
            "threads": self.threads,
            "kernels": self.model.kernels,
        }
