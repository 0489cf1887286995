"""Loads the kernels and declares their C interface."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path

_INT, _POINTER, _TEXT = ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p

_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "dspark_error": (_TEXT, []),
    "dspark_supported": (_TEXT, []),
    "dspark_create": (_POINTER, [_TEXT, _POINTER, ctypes.c_float, _POINTER]),
    "dspark_destroy": (None, [_POINTER]),
    "dspark_set_matrix": (_INT, [_POINTER, _INT, _INT, _INT, _POINTER, _INT, _INT, _POINTER]),
    "dspark_set_embedding": (_INT, [_POINTER, _INT, _POINTER]),
    "dspark_set_norm": (_INT, [_POINTER, _INT, _INT, _POINTER, _INT]),
    "dspark_set_layer": (_INT, [_POINTER, _INT, _INT, _INT]),
    "dspark_forward": (
        _INT,
        [
            *(_POINTER, _INT, _POINTER, _POINTER, _POINTER, _INT, _POINTER, _POINTER),
            *(_INT, _POINTER, _POINTER, _INT, _POINTER),
        ],
    ),
    "dspark_borrow": (_INT, [_POINTER, _POINTER, _INT]),
    "dspark_set_draft": (_INT, [_POINTER, _INT, _INT, _POINTER, _INT, _POINTER, ctypes.c_float, _POINTER]),
    "dspark_context": (_INT, [_POINTER, _INT, _POINTER, _POINTER, _POINTER]),
    "dspark_draft": (_INT, [_POINTER, _POINTER, _INT, _POINTER, _INT, _POINTER, _POINTER, _POINTER]),
    "dspark_softmax": (None, [_POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER]),
    "dspark_decide": (None, [_POINTER, _INT, _POINTER, _POINTER, _INT]),
    "dspark_logprobs": (None, [*[_POINTER] * 3, _INT, _INT, _INT, *[_POINTER] * 4]),
    "dspark_coupled_argmax": (None, [_POINTER, _INT, _INT, _POINTER, _POINTER]),
    "dspark_uniforms": (None, [_POINTER, _POINTER, _POINTER, _INT, _INT, _INT, _POINTER]),
    "dspark_row_keys": (None, [_POINTER, _POINTER, _POINTER, _INT, _POINTER]),
    "dspark_filter": (None, [_POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER]),
    "dspark_penalise": (None, [_POINTER, _INT, _POINTER, ctypes.c_float, ctypes.c_float]),
    "dspark_repeat": (None, [_POINTER, _INT, _POINTER, ctypes.c_float]),
    "dspark_allow": (None, [_POINTER, _INT, _POINTER]),
    "dspark_product": (_INT, [_POINTER, _INT, _INT, _POINTER, _INT, _POINTER]),
}


class NativeError(RuntimeError):
    """A call into the kernels failed; the message is theirs."""


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """The kernels, or None where the package was installed without a compiler.

    DSPARK_KERNELS names another build of them, for tests.
    """
    other = os.environ.get("DSPARK_KERNELS")
    for path in [Path(other)] if other else sorted(Path(__file__).parent.glob("_kernels*.so")):
        try:
            loaded = ctypes.CDLL(str(path))
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(loaded, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError):
            continue  # built for another machine, or by an older version
        return loaded
    return None


def supported() -> tuple[str, ...]:
    """Instruction sets that this machine runs, best first; empty without the library."""
    loaded = native_library()
    if loaded is None:
        return ()
    names: bytes = loaded.dspark_supported()
    return tuple(names.decode().split())


def check(status: int) -> None:
    """Raise NativeError if a call failed."""
    if status != 0:
        loaded = native_library()
        assert loaded is not None
        message: bytes = loaded.dspark_error()
        raise NativeError(message.decode(errors="replace"))
