"""Writes down what FlashInfer's wrapper takes, from the package as it is installed.

    python -m tests.engine.cuda.record_signatures

The package is large and does not belong into a CPU environment; it imports without a GPU, though.
"""

from __future__ import annotations

import inspect
import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

from engine.cuda.flashinfer import wrapper_class

FILE = Path(__file__).with_name("flashinfer_signatures.json")
METHODS = ("__init__", "plan", "run", "workspace_size", "reset_workspace_buffer")


def signatures() -> dict[str, Any]:
    """Of the methods that we call: name, kind and, if there is one, default of each parameter."""
    wrapper = wrapper_class()
    return {
        "version": version("flashinfer-python"),
        "methods": {
            name: [
                [each.name, each.kind.name, each.default is not inspect.Parameter.empty]
                for each in inspect.signature(getattr(wrapper, name)).parameters.values()
            ]
            for name in METHODS
        },
    }


def loaded_modules() -> list[str]:
    """Generators of the compiled modules that the wrapper loads with fa2, as its source names them."""
    from flashinfer import prefill

    source = inspect.getsource(prefill.get_batch_prefill_module.__wrapped__)
    branch = source.partition('backend == "fa2"')[2].partition("else:")[0]
    return re.findall(r"^ *module = (\w+)\(", branch, re.MULTILINE)


def main() -> None:
    recorded = signatures() | {"modules": loaded_modules()}
    FILE.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
