"""A GGUF file's own weight blocks, kept in a form that loads in no time.

Reading GGUF takes seconds, so the blocks are copied once, as they are, to a file beside the converted
model: uint8 [rows, bytes a row] for quantised tensors, float32 for the rest.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.models.gguf_convert import source_gguf, stored_rows
from engine.models.weights import CorruptModel, save_arrays

log = logging.getLogger("dspark.engine")

_FILE = "blocks.bin"  # not *.safetensors, which would make it a part of the model

Blocks = Mapping[str, tuple[str, npt.NDArray[np.generic]]]


def load_blocks(folder: Path) -> Iterator[tuple[str, str, npt.NDArray[np.generic]]]:
    """(name, GGUF type, rows) of every tensor of the GGUF file behind `folder`; see `stored_rows`.

    Raises FileNotFoundError if the folder was not converted from a GGUF file that is still there. A copy that
    cannot be kept is told in the log: the next start will read the GGUF file again.
    """
    from safetensors import SafetensorError, safe_open

    path = Path(folder) / _FILE
    if not path.is_file():
        blocks = _of_gguf(Path(folder))
        try:
            _keep(path, blocks)
        except OSError as error:
            log.warning("cannot keep the weights' blocks, every start will read GGUF: %s", error)
        yield from ((name, kind, values) for name, (kind, values) in blocks.items())
        return
    try:
        with safe_open(path, framework="numpy") as file:
            types: dict[str, str] = json.loads(file.metadata()["types"])
            for name, kind in types.items():
                yield name, kind, file.get_tensor(name)
    except (SafetensorError, KeyError, ValueError) as error:
        raise CorruptModel(f"{path}: truncated or damaged ({error}); delete it") from error


def _of_gguf(folder: Path) -> Blocks:
    source = source_gguf(folder)
    if source is None:
        raise FileNotFoundError(f"{folder} was not converted from a GGUF file that is still there")
    return {name: (kind, values) for name, kind, values in stored_rows(source)}


def _keep(path: Path, blocks: Blocks) -> None:
    """Raises OSError. The file appears whole or not at all."""
    types = json.dumps({name: kind for name, (kind, _) in blocks.items()})
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_arrays({name: values for name, (_, values) in blocks.items()}, partial, {"types": types})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
