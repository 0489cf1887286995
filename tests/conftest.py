"""What holds for all tests: their order, and how long a big model stays."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with long tests come first: at the end, one would keep its worker busy while the others idle."""
    long = {item.path for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(autouse=True, scope="module")
def models_go_with_their_file() -> Iterator[None]:
    """Of the default model in three forms, with its caches, a test process would keep gigabytes."""
    yield
    real = sys.modules.get("tests.engine.real")
    if real is not None:
        real.parts.cache_clear()
        gc.collect()
