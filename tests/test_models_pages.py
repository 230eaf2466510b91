"""Weights share large arrays, and none lies upon another."""

from __future__ import annotations

import gc
import weakref

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trimmoe.models.compiled.lanes import LINE
from trimmoe.models.compiled.pages import CHUNK_BYTES, OWN_BYTES, Chunks

sizes = st.one_of(
    st.integers(0, 4 * LINE), st.integers(OWN_BYTES - 2, OWN_BYTES + 2), st.just(CHUNK_BYTES)
)


@given(st.lists(sizes, max_size=12))
def test_every_piece_begins_a_cache_line_and_is_its_owners_alone(wanted: list[int]) -> None:
    chunks = Chunks()
    pieces = [chunks.room(size) for size in wanted]
    assert [piece.size for piece in pieces] == wanted
    for number, piece in enumerate(pieces):
        assert piece.size == 0 or piece.ctypes.data % LINE == 0
        # What costs memory in large pieces is seen at their ends.
        piece[:2] = piece[-2:] = number
    for number, piece in enumerate(pieces):
        assert (piece[:2] == number).all()
        assert (piece[-2:] == number).all()


def test_small_pieces_share_an_array_which_goes_with_the_last_of_them() -> None:
    chunks = Chunks()
    first, second = chunks.room(100), chunks.room(200)
    assert first.base is second.base
    shared = weakref.ref(np.asarray(first.base))
    for _ in range(CHUNK_BYTES // OWN_BYTES):
        chunks.room(OWN_BYTES - 1)
    del first
    gc.collect()
    assert shared() is not None
    del second
    gc.collect()
    assert shared() is None
