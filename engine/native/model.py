"""A model on the kernels' side: created, and given its weights matrix by matrix."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from engine.models.config import ModelConfig
from engine.models.decoder import rope_frequencies
from engine.models.shapes import check_shapes
from engine.native.loader import NativeError, check, native_library, supported
from engine.native.weights import FORMATS, Rows, Weights

#: stand for a layer's index where no layer is meant
HEAD, DRAFT = -1, -2

_MATRICES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


class NativeModel:
    """Owns packed weights and K/V pools, both outside Python; the kernels keep copies of what they are given.

    `vocab` is the head's; `kernels` names the instruction set (None: the best that this machine runs). Raises
    NativeError when the library is missing, refuses the sizes, or a weight is missing.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab: int,
        num_pages: int,
        threads: int,
        max_positions: int,
        kernels: str | None = None,
    ) -> None:
        loaded = native_library()
        if loaded is None or not supported():
            raise NativeError("the native kernels were not built")
        self.config = config
        self.lib = loaded
        self.kernels = kernels or supported()[0]
        self.formats: set[str] = set()
        sizes = (ctypes.c_int32 * 10)(
            vocab,
            config.hidden_size,
            config.intermediate_size,
            config.num_layers,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            max_positions,
            num_pages,
            threads,
        )
        table = _rope_table(config, max_positions)
        name = self.kernels.encode()
        self.handle = loaded.dspark_create(name, sizes, config.rms_eps, table.ctypes.data)
        if not self.handle:
            check(-1)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.lib.dspark_destroy(self.handle)

    def set_layers(self, weights: Weights) -> None:
        """All decoder layers and the final norm. Raises CorruptModel for shapes that are not the config's."""
        config = self.config
        check_shapes(config, {name: _shape(value) for name, value in weights.items()})
        for layer in range(config.num_layers):
            prefix = f"layers.{layer}"
            for which, name in enumerate(_MATRICES):
                bias = _vector(weights, f"{prefix}.{name}.bias", needed=False)
                self.set_matrix(layer, which, _matrix(weights, f"{prefix}.{name}.weight"), bias)
            self.set_norm(layer, 0, weights, f"{prefix}.input_layernorm.weight")
            self.set_norm(layer, 1, weights, f"{prefix}.post_attention_layernorm.weight")
            self.set_norm(layer, 2, weights, f"{prefix}.self_attn.q_norm.weight", config.qk_norm)
            self.set_norm(layer, 3, weights, f"{prefix}.self_attn.k_norm.weight", config.qk_norm)
            window, rotates = config.sliding_windows[layer] or 0, int(config.rope_layers[layer])
            check(self.lib.dspark_set_layer(self.handle, layer, window, rotates))
        self.set_norm(HEAD, 0, weights, "norm.weight")

    def set_embedding(self, weights: Weights) -> None:
        rows = _matrix(weights, "embed_tokens.weight")
        data = np.ascontiguousarray(rows.data)
        check(self.lib.dspark_set_embedding(self.handle, FORMATS[rows.format], data.ctypes.data))

    def set_head(self, weights: Weights) -> None:
        name = "embed_tokens.weight" if self.config.tie_embeddings else "lm_head.weight"
        self.set_matrix(HEAD, 0, _matrix(weights, name))

    def set_matrix(
        self, layer: int, which: int, rows: Rows, bias: npt.NDArray[np.float32] | None = None
    ) -> None:
        """which: q, k, v, output, gate, up, down of a layer; of DRAFT: fuse, bias, mix; of HEAD: the head."""
        data = np.ascontiguousarray(rows.data)
        self.formats.add(rows.format)
        status = self.lib.dspark_set_matrix(
            self.handle,
            layer,
            which,
            FORMATS[rows.format],
            data.ctypes.data,
            rows.count,
            rows.cols,
            None if bias is None else bias.ctypes.data,
        )
        check(status)

    def set_norm(self, layer: int, which: int, weights: Weights, name: str, needed: bool = True) -> None:
        """which: input, mlp, q, k of a layer; of HEAD: the final norm; of DRAFT: the fused features' norm."""
        values = _vector(weights, name, needed)
        if values is not None:
            check(self.lib.dspark_set_norm(self.handle, layer, which, values.ctypes.data, len(values)))


def _shape(value: Rows | npt.NDArray[np.float32]) -> tuple[int, ...]:
    return (value.count, value.cols) if isinstance(value, Rows) else value.shape


def _vector(weights: Weights, name: str, needed: bool = True) -> npt.NDArray[np.float32] | None:
    value = weights.get(name)
    if value is None and not needed:
        return None
    if value is None or isinstance(value, Rows):
        raise NativeError(f"the checkpoint has no vector {name!r}")
    return np.ascontiguousarray(value, dtype=np.float32)


def _matrix(weights: Weights, name: str) -> Rows:
    value = weights.get(name)
    if not isinstance(value, Rows):
        raise NativeError(f"the checkpoint has no matrix {name!r}")
    return value


def _rope_table(config: ModelConfig, positions: int) -> npt.NDArray[np.float32]:
    """[positions, 2, head_dim / 2]: cosines, then sines."""
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), rope_frequencies(config))
    return torch.stack((angles.cos(), angles.sin()), dim=1).numpy()
