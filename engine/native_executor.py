"""The CPU executor: a whole forward pass in one call of the C++ kernels, with the interpreter lock released.

Batch-invariant by construction: a row's bits depend on the row and its context alone, so greedy and seeded
texts are the same with speculation on and off, alone and in a crowd, on one thread and on many.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import ForwardOutput, VerificationBatch
from engine.models.config import ModelConfig
from engine.models.decoder import rope_frequencies
from engine.native.loader import NativeError, check, native_library, supported
from engine.native.weights import FORMATS, Rows, Weights

PAGE_SIZE = 16  # fixed in the kernels

_MATRICES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


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
        loaded = native_library()
        if loaded is None or not supported():
            raise NativeError("the native kernels were not built")
        self.config = config
        self.page_size = PAGE_SIZE
        self.num_pages = num_pages
        self.threads = threads
        self.kernels = kernels or supported()[0]
        self._library = loaded
        self._staging = np.empty(1024, dtype=np.int32)
        sizes = np.array(
            [
                config.vocab_size,
                config.hidden_size,
                config.intermediate_size,
                config.num_layers,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                max_positions,
                num_pages,
                threads,
            ],
            dtype=np.int32,
        )
        table = _rope_table(config, max_positions)
        self._handle = loaded.dspark_create(
            self.kernels.encode(), _address(sizes), config.rms_eps, _address(table)
        )
        if not self._handle:
            check(-1)
        self.formats = self._load(weights)

    def __del__(self) -> None:
        if getattr(self, "_handle", None):
            self._library.dspark_destroy(self._handle)

    def forward(self, batch: VerificationBatch, feature_layers: tuple[int, ...] = ()) -> ForwardOutput:
        """See `Executor.forward`."""
        items = batch.items
        held, rows = sum(len(item.pages) for item in items), batch.rows
        wanted = sum(1 + item.verify for item in items if item.sample)
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
            if item.sample:
                staging[logit : logit + 1 + item.verify] = range(row - item.verify - 1, row)
                logit += 1 + item.verify
            spans_at, page, token = spans_at + 3, page + len(item.pages), token + item.count
        layers = (ctypes.c_int32 * len(feature_layers))(*feature_layers)
        logits = torch.empty((wanted, self.config.vocab_size))
        features = torch.empty((rows, len(layers) * self.config.hidden_size)) if feature_layers else None
        base = staging.ctypes.data
        check(
            self._library.dspark_forward(
                self._handle,
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
            )
        )
        return ForwardOutput(logits, features)

    def describe(self) -> Mapping[str, Any]:
        """See `Executor.describe`."""
        return {
            "executor": "native",
            "device": "cpu",
            "dtype": "+".join(sorted(self.formats)).lower(),
            "threads": self.threads,
            "kernels": self.kernels,
        }

    def _load(self, weights: Weights) -> set[str]:
        """Hand everything over; returns the formats of the matrices. The kernels keep copies of their own."""
        formats = set()

        def vector(name: str, needed: bool = True) -> npt.NDArray[np.float32] | None:
            value = weights.get(name)
            if value is None and not needed:
                return None
            if value is None or isinstance(value, Rows):
                raise NativeError(f"the checkpoint has no vector {name!r}")
            return np.ascontiguousarray(value, dtype=np.float32)

        def matrix(name: str) -> Rows:
            value = weights.get(name)
            if not isinstance(value, Rows):
                raise NativeError(f"the checkpoint has no matrix {name!r}")
            formats.add(value.format)
            return value

        def give_norm(layer: int, which: int, name: str, needed: bool = True) -> None:
            values = vector(name, needed)
            if values is not None:
                check(
                    self._library.dspark_set_norm(self._handle, layer, which, _address(values), len(values))
                )

        def give_matrix(layer: int, which: int, rows: Rows, bias: npt.NDArray[np.float32] | None) -> None:
            data = np.ascontiguousarray(rows.data)
            check(
                self._library.dspark_set_matrix(
                    self._handle,
                    layer,
                    which,
                    FORMATS[rows.format],
                    _address(data),
                    rows.count,
                    rows.cols,
                    None if bias is None else _address(bias),
                )
            )

        config = self.config
        for layer in range(config.num_layers):
            prefix = f"layers.{layer}"
            for which, name in enumerate(_MATRICES):
                bias = vector(f"{prefix}.{name}.bias", needed=False)
                give_matrix(layer, which, matrix(f"{prefix}.{name}.weight"), bias)
            give_norm(layer, 0, f"{prefix}.input_layernorm.weight")
            give_norm(layer, 1, f"{prefix}.post_attention_layernorm.weight")
            give_norm(layer, 2, f"{prefix}.self_attn.q_norm.weight", config.qk_norm)
            give_norm(layer, 3, f"{prefix}.self_attn.k_norm.weight", config.qk_norm)
            window = config.sliding_windows[layer] or 0
            check(self._library.dspark_set_layer(self._handle, layer, window, int(config.rope_layers[layer])))
        give_norm(-1, 0, "norm.weight")
        embedding = matrix("embed_tokens.weight")
        data = np.ascontiguousarray(embedding.data)
        check(self._library.dspark_set_embedding(self._handle, FORMATS[embedding.format], _address(data)))
        give_matrix(-1, 0, embedding if config.tie_embeddings else matrix("lm_head.weight"), None)
        return formats


def _rope_table(config: ModelConfig, positions: int) -> npt.NDArray[np.float32]:
    """[positions, 2, head_dim / 2]: cosines, then sines."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), rope_frequencies(config))
    return torch.stack((angles.cos(), angles.sin()), dim=1).numpy()


def _address(array: npt.NDArray[Any]) -> ctypes.c_void_p:
    """A contiguous array's memory; the caller keeps the array alive for the call."""
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)
