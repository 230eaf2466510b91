"""Changed frames of real answers: whoever sends them, servers read on and talk to one another.

`benchmarks/fuzz.py` does the same a million times.
"""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest

from hostile import Mutator, patiently
from hostile_wire import (
    Frames,
    decoders,
    geometry_of,
    member,
    overheard,
    recorded,
    strangers,
)
from serving import Tiny
from trimmoe.runtime.launch.deployment import (
    Hello,
    Timed,
    decode_deployment,
    decode_to_head,
    decode_to_member,
    encode,
)

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
    assert found["malformed message"] > 0
    assert found["no envelope"] > 0


def test_what_is_no_word_between_a_head_and_its_members_is_none() -> None:
    """Reports may hold anything, however deep; the thread that listens lives on."""
    said = Hello(
        version="1",
        servers=("desk",),
        address="10.0.0.1",
        memory_bytes=1,
        cores=1,
        timed=(Timed(number=1, report={"work_s": [1.0]}),),
    )
    assert decode_to_head(encode(said)) == said
    deep = encode(said).replace(b"\xa6work_s", b"\xa6work_s" + b"\x91" * 100_000)
    assert len(deep) > 100_000
    mutator = Mutator(4)
    for content in (
        b"",
        b"\x91" * 100_000,
        deep,
        *(mutator.bytes(encode(said)) for _ in range(300)),
    ):
        for decode in (decode_to_head, decode_to_member, decode_deployment):
            decode(content)
    assert decode_to_head(deep) is None


def test_who_listens_on_a_link_sees_nothing_but_noise() -> None:
    """A neighbour between two servers that notes all that passes."""
    seen = asyncio.run(overheard(b"a secret that is long enough to be found"))
    assert len(seen) > 1000
    assert b"secret" not in seen


async def test_who_has_no_key_may_send_what_it_likes() -> None:
    found = await strangers(1000, seed=3)
    assert found["connection not of this protocol"] > 5
    assert "malformed message" not in found
