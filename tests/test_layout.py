"""The rooms import one another in one direction only, and no source file outgrows one concept."""

import ast
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT: dict[str, set[str]] = {
    "scheduler": set(),
    "engine": {"scheduler"},
    "drafters": {"engine", "scheduler"},
    "server": {"drafters", "engine", "scheduler"},
    "loadtest": set(),
}

# The scheduler decides over numbers that it is given: it computes no tensors, reads no clock, does no I/O.
NOT_FOR_THE_SCHEDULER = {
    "torch",
    "transformers",
    "time",
    "datetime",
    "asyncio",
    "threading",
    "socket",
    "subprocess",
    "httpx",
}

SOURCE_SUFFIXES = {".py", ".cpp", ".h", ".hpp", ".cu", ".cuh"}
LONGEST_FILE = 350


def imports(tree: ast.AST) -> Iterator[tuple[int, str, bool]]:
    """Yield line, top-level package and whether the import waits inside a function, for each import.

    Relative imports stay inside a room, so they are left out. A name handed to ``import_module`` or
    ``__import__`` counts when it is written down as a string.
    """

    def walk(node: ast.AST, lazy: bool) -> Iterator[tuple[int, str, bool]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.partition(".")[0], lazy
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module.partition(".")[0], lazy
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = ast.unparse(node.func).rpartition(".")[2]
            if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value.partition(".")[0], lazy
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside)

    return walk(tree, False)


def is_command_line(path: PurePosixPath) -> bool:
    return path.parts[0] == "server" and path.parts[1].partition(".")[0] == "cli"


def violations(path: PurePosixPath, source: str) -> list[str]:
    """Say what the file at ``path``, relative to the repository, imports against the rules."""
    room = path.parts[0]
    found = []
    forbidden = MAY_IMPORT.keys() - MAY_IMPORT[room] - {room}
    if room == "scheduler":
        forbidden |= NOT_FOR_THE_SCHEDULER
    for line, package, lazy in imports(ast.parse(source)):
        if package == "loadtest" and lazy and is_command_line(path):
            continue
        if package in forbidden:
            found.append(f"{path}:{line}: {room} imports {package}")
    return found


def sources(room: str) -> Iterator[Path]:
    return (path for path in sorted((ROOT / room).rglob("*")) if path.suffix in SOURCE_SUFFIXES)


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_one_way(room: str) -> None:
    files = [path for path in sources(room) if path.suffix == ".py"]
    assert ROOT / room / "__init__.py" in files
    found = [
        each
        for path in files
        for each in violations(
            PurePosixPath(path.relative_to(ROOT).as_posix()), path.read_text(encoding="utf-8")
        )
    ]
    assert not found, "\n".join(found)


def test_no_source_file_is_longer_than_one_concept_needs() -> None:
    lengths = {
        path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines())
        for room in [*MAY_IMPORT, "deploy"]
        for path in sources(room)
    }
    too_long = {path: length for path, length in lengths.items() if length > LONGEST_FILE}
    assert not too_long, f"over {LONGEST_FILE} lines, find the second concept in them: {too_long}"


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("scheduler/admission.py", "import engine.params"),
        ("scheduler/cost.py", "import torch"),
        ("scheduler/cost.py", "from torch import nn"),
        ("scheduler/cost.py", "from time import monotonic"),
        ("scheduler/admission.py", "import importlib\nimportlib.import_module('engine.params')"),
        ("engine/loop.py", "from drafters.base import Drafter"),
        ("engine/models/llama.py", "def build():\n    import drafters"),
        ("engine/loop.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import server.app"),
        ("drafters/dspark.py", "import server"),
        ("loadtest/sweep.py", "from engine import params"),
        ("loadtest/sweep.py", "import server.sse"),
        ("server/app.py", "def run():\n    import loadtest"),
        ("server/cli.py", "import loadtest.sweep"),
        ("engine/loop.py", "__import__('loadtest')"),
    ],
)
def test_the_check_sees_a_violation(path: str, source: str) -> None:
    assert len(violations(PurePosixPath(path), source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("scheduler/cost.py", "import bisect\nimport numpy\nfrom scheduler import admission"),
        ("engine/models/llama.py", "import torch\nfrom . import base\nfrom engine.models import config"),
        ("engine/loop.py", "import time\nimport scheduler"),
        ("drafters/dspark.py", "import engine\nimport scheduler.admission"),
        ("server/app.py", "import drafters, engine, scheduler"),
        ("server/cli.py", "def bench():\n    from loadtest import sweep"),
        ("server/cli/bench.py", "def bench():\n    from loadtest import sweep"),
        ("loadtest/sweep.py", "import httpx\nfrom loadtest import report"),
    ],
)
def test_the_check_allows_what_is_allowed(path: str, source: str) -> None:
    assert violations(PurePosixPath(path), source) == []
