"""What all tests share."""

from __future__ import annotations

import os

# On two cores, many small matrices run faster without threads that wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
