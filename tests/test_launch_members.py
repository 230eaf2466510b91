"""Who may join a head, and who is told in one sentence that it cannot be."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from launching import free_ports
from trimmoe.core.errors import UserError
from trimmoe.runtime.launch.deployment import Hello, Refused, Wanted
from trimmoe.runtime.launch.members import Members
from trimmoe.runtime.wire.keys import generate_token
from trimmoe.runtime.wire.protocol import WIRE_VERSION


@pytest.fixture(scope="module")
def port() -> int:
    return free_ports(1)


@pytest.fixture(scope="module")
def members(port: int) -> Iterator[Members]:
    with Members(generate_token(), "127.0.0.1", port, own=["desk"]) as found:
        yield found


def _hello(*servers: str, address: str) -> Hello:
    return Hello(
        version="1",
        wire=WIRE_VERSION.major,
        servers=servers,
        address=address,
        memory_bytes=1 << 30,
        cores=2,
    )


def test_a_second_head_on_a_port_is_told_what_to_do(members: Members, port: int) -> None:
    with pytest.raises(UserError, match=f"cannot listen at 127.0.0.1:{port} .*--head-port"):
        Members(generate_token(), "127.0.0.1", port, own=["attic"])


def test_a_second_server_of_a_name_is_kept_out_and_changes_nothing(members: Members) -> None:
    first = _hello("attic", address="10.0.0.2")
    assert isinstance(members._answer(b"a", first), Wanted)
    for name, address in (("attic", "10.0.0.3"), ("desk", "10.0.0.4")):
        answer = members._answer(b"b", _hello("shed", name, address=address))
        assert isinstance(answer, Refused)
        assert (
            answer.reason
            == f"Another machine is server {name} already; give --server another name."
        )
    assert set(members.joined()) == {"attic"}
    assert members.joined()["attic"].address == "10.0.0.2"


def test_a_machine_that_started_again_has_its_server_back(members: Members) -> None:
    assert isinstance(members._answer(b"a", _hello("attic", address="10.0.0.2")), Wanted)
    assert isinstance(members._answer(b"c", _hello("attic", address="10.0.0.2")), Wanted)
    assert set(members.joined()) == {"attic"}
