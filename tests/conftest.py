"""What all tests share."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from serving import Tiny

# On two cores, many small matrices run faster without threads that wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, lest one process is left with them when the other has
    nothing to do any more."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The tiny checkpoint, opened."""
    from serving import open_tiny  # Only here: it takes torch, which most tests do without.

    return open_tiny(tmp_path_factory.mktemp("tiny"))
