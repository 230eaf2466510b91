"""Changed frames of real answers: whoever sends them, servers read on and talk to one another.

`benchmarks/fuzz.py` does the same a million times.
"""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest

from hostile import patiently
from hostile_wire import Frames, decoders, geometry_of, member, recorded, strangers
from serving import Tiny

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def sent(tiny: Tiny) -> list[tuple[str, Frames]]:
    return asyncio.run(recorded(tiny))


def test_changed_frames_are_refused_by_name(sent: list[tuple[str, Frames]], tiny: Tiny) -> None:
    largest = max(sum(map(len, frames)) for _, frames in sent)
    tracemalloc.start()
    try:
        with patiently(PATIENCE_S):
            found = decoders(sent, geometry_of(tiny), 3000, seed=1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert set(found) == {"no envelope", "beat", "no beat", "no message", "nonsense", "message"}
    assert peak < 5_000_000 + 100 * largest


async def test_who_has_a_valid_key_may_send_what_it_likes(sent: list[tuple[str, Frames]]) -> None:
    found = await member(sent, 800, seed=2)
    assert found["malformed message"] > 10
    assert found["no envelope"] > 10


async def test_who_has_no_key_may_send_what_it_likes() -> None:
    found = await strangers(1000, seed=3)
    assert found["connection not of this protocol"] > 5
    assert "malformed message" not in found
