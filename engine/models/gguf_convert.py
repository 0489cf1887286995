"""Converting one GGUF file to a folder in the Hugging Face layout: float32 safetensors with exact values."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.models.gguf_config import architecture_of, build_config, build_generation_config
from engine.models.gguf_tokenizer import build_tokenizer, build_tokenizer_config
from engine.models.unsupported import UnsupportedModel
from engine.models.weights import CorruptModel, save_arrays

CONVERTER_VERSION = 1  # raised when the output changes, so that cached folders are made anew

_SHARD_BYTES = 2 << 30  # bounds the memory that a conversion takes
_SOURCE = "source.json"
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_DIVISORS = "rope_freqs.weight"


def file_sha256(path: Path) -> str:
    """Hex sha256 of a file's contents."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def source_gguf(folder: Path) -> Path | None:
    """The GGUF file that `folder` was converted from, or None if it was not or the file has moved away."""
    record = Path(folder) / _SOURCE
    if not record.is_file():
        return None
    path: Path = Path(folder) / json.loads(record.read_text(encoding="utf-8"))["path"]
    return path if path.is_file() else None


def convert_gguf(
    source: Path,
    destination: Path,
    *,
    sha256: str | None = None,
    keep_source: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Path:
    """Convert the GGUF file `source` to the new folder `destination` and return it.

    The folder holds config.json, generation_config.json, tokenizer.json, tokenizer_config.json,
    model.safetensors (or shards with an index, past 2 GiB) and source.json, which `source_gguf` reads. It
    appears whole or not at all. `keep_source` moves the GGUF file into it. Raises UnsupportedModel for an
    architecture, tokenizer or tensor that is not known, CorruptModel for a damaged file, OSError for a full
    disk.
    """
    source = Path(source).resolve()
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=partial_prefix(destination), dir=destination.parent))
    try:
        progress(f"converting {source.name} (once)")
        _convert_into(partial, source)
        record = {
            "file": source.name,
            "path": source.name if keep_source else str(source),
            "sha256": sha256 or file_sha256(source),
            "converter": CONVERTER_VERSION,
        }
        _write_json(partial / _SOURCE, record)
        if keep_source:
            os.replace(source, partial / source.name)
        # Temporary folders and safetensors files are made private, but a cache may be shared.
        partial.chmod(0o755)
        for file in partial.iterdir():
            file.chmod(0o644)
        os.rename(partial, destination)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return destination


def partial_prefix(destination: Path) -> str:
    """Name prefix of the temporary folders beside `destination` that an interrupted conversion leaves."""
    return f".{destination.name}.partial-"


def _convert_into(folder: Path, source: Path) -> None:
    metadata, tensors = _read(source)
    try:
        shapes = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in tensors.items()}
        divisors = tensors.pop(_ROPE_DIVISORS, None)
        config = build_config(metadata, shapes, None if divisors is None else _values(divisors))
        tokenizer_config = build_tokenizer_config(metadata)
    except KeyError as error:
        raise CorruptModel(f"{source}: the GGUF file lacks {error}") from None
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", build_generation_config(metadata))
    tokenizer = build_tokenizer(metadata, source).to_str(pretty=False)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    permuted = architecture_of(metadata).permuted
    interleaved = {
        "attn_q": config["num_attention_heads"] if permuted else 0,
        "attn_k": config["num_key_value_heads"] if permuted else 0,
    }
    _write_tensors(folder, tensors, interleaved)


def _read(source: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(metadata by key, the reader's tensors by name)."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(source))
        metadata = {key: field.contents() for key, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError, OverflowError, UnicodeDecodeError) as error:
        raise CorruptModel(f"{source}: not a readable GGUF file ({error})") from error
    return metadata, {tensor.name: tensor for tensor in reader.tensors}


def _values(tensor: Any) -> npt.NDArray[np.float32]:
    """A reader's tensor dequantised, rows first."""
    from gguf import dequantize

    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError:
        raise UnsupportedModel(f"GGUF quantisation {tensor.tensor_type.name} is not supported") from None
    return np.ascontiguousarray(values, dtype=np.float32)


def _deinterleave(rows: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """[heads*D, ...] -> the same rows in Hugging Face order.

    GGUF stores a Llama head's rotary pairs side by side (0, D/2, 1, D/2 + 1, ...), Hugging Face in halves.
    """
    pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _hf_name(name: str) -> tuple[str, str]:
    """GGUF tensor name -> (Hugging Face name, GGUF stem inside the block or '')."""
    inner = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if inner and inner[2] in _INNER:
        return f"model.layers.{inner[1]}.{_INNER[inner[2]]}.{inner[3]}", inner[2]
    stem, _, kind = name.rpartition(".")
    if stem in _OUTER and kind == "weight":
        return f"{_OUTER[stem]}.{kind}", ""
    raise UnsupportedModel(f"GGUF tensor {name!r} has no counterpart in this architecture")


def _write_tensors(folder: Path, tensors: Mapping[str, Any], interleaved: Mapping[str, int]) -> None:
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        needed = 4 * int(tensor.n_elements)
        if shards[-1] and size + needed > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += needed
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = (
            "model.safetensors" if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        )
        arrays = {}
        for name in names:
            hf_name, stem = _hf_name(name)
            heads = interleaved.get(stem, 0)
            values = _values(tensors[name])
            arrays[hf_name] = _deinterleave(values, heads) if heads else values
            weight_map[hf_name] = file
        save_arrays(arrays, folder / file, {"format": "pt"})
    if len(shards) > 1:
        total = sum(4 * int(tensor.n_elements) for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def stored_rows(source: Path) -> Iterator[tuple[str, str, npt.NDArray[Any]]]:
    """(Hugging Face name, GGUF type name, rows) of every tensor of a GGUF file, in the file's own blocks.

    Rows are bytes [out, bytes a row] for quantised types and values for F32; those of q and k are in Hugging
    Face order. Raises CorruptModel or UnsupportedModel as `convert_gguf` does.
    """
    metadata, tensors = _read(Path(source))
    tensors.pop(_ROPE_DIVISORS, None)
    shapes = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in tensors.items()}
    config = build_config(metadata, shapes, None)
    permuted = architecture_of(metadata).permuted
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in tensors.items():
        hf_name, stem = _hf_name(name)
        rows = np.asarray(tensor.data)
        if permuted and stem in heads:
            rows = rows.reshape(heads[stem], -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)
        yield hf_name, tensor.tensor_type.name, np.ascontiguousarray(rows)
