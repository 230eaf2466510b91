"""Memory for weights, in large pages where the system has them.

A step reads all of its weights, a page after the other, and looks up where each page is. Of large
pages there are few enough that the processor remembers them all, which matters most in virtual
machines, where looking one up takes twice as many steps. NumPy asks the system for them, but only
for large arrays; matrices are smaller, so that several share one.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from trimmoe.models.compiled.lanes import LINE

Bytes = NDArray[np.uint8]
CHUNK_BYTES = 1 << 25
"""Of an array that is shared. What nobody has written to takes no memory."""
OWN_BYTES = CHUNK_BYTES // 4
"""What takes as much has an array of its own."""


class Chunks:
    """Arrays that are handed out piece by piece, each for as long as a piece of it is held."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._left: Bytes = np.empty(0, dtype=np.uint8)

    def room(self, size_bytes: int) -> Bytes:
        """So many bytes from the beginning of a cache line on."""
        if size_bytes >= OWN_BYTES:
            return _from_a_line(np.empty(size_bytes + LINE, dtype=np.uint8))[:size_bytes]
        with self._turn:
            if self._left.size < size_bytes:
                self._left = _from_a_line(np.empty(CHUNK_BYTES, dtype=np.uint8))
            taken, rest = np.split(self._left, [size_bytes])
            self._left = rest[-size_bytes % LINE :]
            return taken


def _from_a_line(room: Bytes) -> Bytes:
    """All of it from the first cache line on that begins in it."""
    return room[-room.ctypes.data % LINE :]


CHUNKS = Chunks()
"""Those of this process."""
