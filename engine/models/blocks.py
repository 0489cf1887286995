"""A GGUF file's own weight blocks, kept in a form that loads in no time.

Reading GGUF takes seconds, so the blocks are copied once, as they are, to a file beside the converted
model: uint8 [rows, bytes a row] for quantised tensors, float32 for the rest.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from engine.models.gguf_convert import source_gguf, stored_rows
from engine.models.weights import CorruptModel

_FILE = "blocks.bin"  # not *.safetensors, which would make it a part of the model


def load_blocks(folder: Path) -> Iterator[tuple[str, str, npt.NDArray[np.generic]]]:
    """(name, GGUF type, rows) of every tensor of the GGUF file behind `folder`; see `stored_rows`.

    Raises FileNotFoundError if the folder was not converted from a GGUF file that is still there.
    """
    from safetensors import SafetensorError, safe_open

    path = _blocks_file(Path(folder))
    try:
        with safe_open(path, framework="numpy") as file:
            types: dict[str, str] = json.loads(file.metadata()["types"])
            for name, kind in types.items():
                yield name, kind, file.get_tensor(name)
    except (SafetensorError, KeyError, ValueError) as error:
        raise CorruptModel(f"{path}: truncated or damaged ({error}); delete it") from error


def _blocks_file(folder: Path) -> Path:
    from safetensors.numpy import save_file

    path = folder / _FILE
    if path.is_file():
        return path
    source = source_gguf(folder)
    if source is None:
        raise FileNotFoundError(f"{folder} was not converted from a GGUF file that is still there")
    rows = {name: (kind, values) for name, kind, values in stored_rows(source)}
    types = json.dumps({name: kind for name, (kind, _) in rows.items()})
    partial = folder / f".{_FILE}.{os.getpid()}"
    try:
        save_file({name: values for name, (_, values) in rows.items()}, partial, metadata={"types": types})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path
