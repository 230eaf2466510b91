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


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    """The tiny checkpoint, opened."""
    from serving import open_tiny  # Only here: it takes torch, which most tests do without.

    return open_tiny(tmp_path_factory.mktemp("tiny"))
