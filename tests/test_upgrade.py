"""Servers of the next version among those of this one: on the wire, at the head, on a machine."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import pytest

from launching import PATIENCE_S, Serving, answers, await_answer, free_ports, status, write_files
from test_launch_supervise import GONE, Answer, Fake, supervisor
from trimmoe.core.errors import UserError
from trimmoe.runtime.launch.deployment import Hello, Refused, Wanted
from trimmoe.runtime.launch.folder import RunFolder
from trimmoe.runtime.launch.members import Members
from trimmoe.runtime.launch.note import Note
from trimmoe.runtime.launch.signals import Stop
from trimmoe.runtime.launch.status import Phase, ServerStatus
from trimmoe.runtime.launch.watching import supervising
from trimmoe.runtime.node.records.messages import MESSAGE_TYPES, Lost, Partial
from trimmoe.runtime.node.records.rows import Rows
from trimmoe.runtime.wire.base import Frame
from trimmoe.runtime.wire.codec import decode, encode
from trimmoe.runtime.wire.memory import MemoryCarrier, MemoryNetwork
from trimmoe.runtime.wire.protocol import WIRE_VERSION, Version
from trimmoe.runtime.wire.transport import LinkTransport
from wires import BRISK, TOKEN, soon, until

STAND_IN = str(Path(__file__).with_name("serve_standin.py"))
HERE, NEXT = WIRE_VERSION.major, WIRE_VERSION.minor + 1


class Said(msgspec.Struct, tag="said", array_like=True):
    text: str


class SaidMore(msgspec.Struct, tag="said", array_like=True):
    """The same in the next minor version."""

    text: str
    more: str = "nothing"


class Speaking(MemoryCarrier):
    """Makes what a server says that of another version."""

    major, minor = HERE, NEXT

    def post(self, peer: str, frames: Sequence[Frame]) -> bool:
        version, sender, *rest = msgspec.msgpack.decode(frames[0])
        assert version == HERE
        if self.major == HERE:
            rest[-1] = self.minor
            rest.append({"what": "the next minor version says besides"})
        else:
            rest = [{"quite": "different"}]
        envelope = msgspec.msgpack.encode([self.major, sender, *rest])
        return super().post(peer, [envelope, *frames[1:]])


async def _pair(network: MemoryNetwork, major: int) -> tuple[LinkTransport, LinkTransport]:
    other = Speaking("b", network)
    other.major = major
    a = LinkTransport(network.carrier("a"), (Said,), settings=BRISK)
    b = LinkTransport(other, (SaidMore,), settings=BRISK)
    for here, there in ((a, b), (b, a)):
        await here.start()
        here.connect(there.name, there.address)
    return a, b


async def test_a_newer_minor_version_joins_and_both_are_understood() -> None:
    a, b = await _pair(MemoryNetwork(), HERE)
    await soon(a.wait_up("b"))
    await soon(b.wait_up("a"))
    await b.send("a", SaidMore("from the next version", "which says more"))
    assert (await soon(a.receive())).message == Said("from the next version")
    await a.send("b", Said("from this one"))
    assert (await soon(b.receive())).message == SaidMore("from this one")
    assert (a.version_of("b"), b.version_of("a")) == (Version(HERE, NEXT), WIRE_VERSION)
    assert not a.strangers()
    assert not a.counters.dropped
    await a.close()
    await b.close()


async def test_another_major_version_gets_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    network = MemoryNetwork()
    with caplog.at_level(logging.ERROR):
        a, b = await _pair(network, HERE + 1)
        await until(lambda: a.counters.dropped.get("another version of the protocol", 0) >= 3)
    said = a.strangers()["b"]
    assert f"b speaks version {HERE + 1} of the protocol" in said
    assert f"a version {HERE}" in said
    assert [each.message for each in caplog.records] == [said]
    assert a.peers_up() == b.peers_up() == frozenset()
    await b.close()
    # In its place comes one of this version.
    b = LinkTransport(network.carrier("b"), (Said,), settings=BRISK)
    await b.start()
    b.connect("a", a.address)
    await soon(a.wait_up("b"))
    assert not a.strangers()
    await a.close()
    await b.close()


def test_fields_that_were_appended_to_messages_are_passed_over() -> None:
    rows = Rows([7], [0], [1], [])
    for message in (Partial(layer=1, rows=rows, decoding=True), Lost(sequence=3, position=9)):
        header, *_ = encode(message)
        written, tensors = msgspec.msgpack.decode(header)
        for part in (written, written[2] if isinstance(message, Partial) else written):
            part.append("later")
        read, _ = decode([msgspec.msgpack.encode([written, tensors])], MESSAGE_TYPES)
        assert read == message


# The head.


def _hello(**changes: object) -> Hello:
    fields = {"version": "9.9", "wire": HERE, "servers": ("s",), "address": "127.0.0.1"}
    return Hello(**{**fields, **changes}, memory_bytes=1, cores=1)  # type: ignore[arg-type]


def test_a_head_takes_members_whose_servers_understand_its_own() -> None:
    with Members(TOKEN, "127.0.0.1", free_ports(1), own=()) as members:
        assert isinstance(members._answer(b"m", _hello()), Wanted)
        refused = members._answer(b"n", _hello(servers=("t",), wire=HERE + 1))
        assert isinstance(refused, Refused)
        assert f"TrimMoE 9.9, whose servers speak version {HERE + 1}" in refused.reason
        # Who does not say speaks the first one.
        bare = msgspec.msgpack.decode(msgspec.msgpack.encode(_hello()))
        del bare["wire"]
        assert msgspec.convert(bare, Hello).wire == 1


# One machine.


class Renewed(Fake):
    """Ends when told to and comes back as another process of another version."""

    def __init__(self, name: str, *after: Answer) -> None:
        super().__init__(name, replace(status(), version="1"))
        self._after = after

    def drain(self) -> None:
        super().drain()
        self._answers = [replace(status(), version="1"), replace(status(Phase.DRAINED), pid=1)]

    def stop(self, patience_s: float) -> None:
        super().stop(patience_s)
        self._answers = [GONE, *self._after]


def test_servers_move_to_another_version_one_after_the_other() -> None:
    fresh = replace(status(pid=2), version="2")
    here = Fake("new already", replace(status(), version="2"))
    fakes = Renewed("a", status(Phase.STARTING, pid=2), fresh), Renewed("b", fresh)
    made, said = supervisor(*fakes, here, looks=20)
    assert made.wait_ready()
    made.renew("2")
    assert said == ["Server a moves to TrimMoE 2.", "Server b moves to TrimMoE 2."]
    assert [each.calls for each in fakes] == [["drain", "stop"]] * 2
    assert not here.calls
    assert [seen and seen.version for seen in made.statuses.values()] == ["2"] * 3


def test_the_others_stay_if_the_first_does_not_start() -> None:
    failed = ServerStatus(phase=Phase.FAILED, pid=2, error="No such model.")
    fakes = Renewed("a", failed), Renewed("b", status(pid=2))
    made, said = supervisor(*fakes, looks=20)
    assert made.wait_ready()
    made.renew("2")
    assert said[1:] == ["Server a does not start (No such model.); the others stay."]
    assert not fakes[1].calls


@dataclass(frozen=True, kw_only=True)
class FakeJob:
    """As far as a run folder asks."""

    version: str = "here"
    wire: int = HERE
    cluster: str = "c"
    token: str = field(default="theirs")

    @property
    def identity(self) -> str:
        return f"{self.version} {self.cluster}"

    def note(self) -> Note:
        return Note(
            version=self.version, wire=self.wire, cluster=self.cluster, token=self.token
        )  # fmt: skip


@pytest.mark.parametrize(
    ("before", "refused"),
    [
        (FakeJob(version="next"), ""),
        (FakeJob(version="next", wire=HERE + 1), f"speak version {HERE + 1} of the protocol"),
        (FakeJob(version="next", cluster="another"), "Other servers run at port"),
    ],
)
def test_servers_of_another_version_are_taken_over_if_they_are_the_same(
    before: FakeJob, refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIMMOE_RUN", str(tmp_path / "run"))
    monkeypatch.setattr("trimmoe.__version__", "here")
    folder, said = RunFolder.at(8000), []
    folder.write(before)  # type: ignore[arg-type]
    lock = folder.claim_process(0)
    assert lock is not None
    job = FakeJob(token="ours")
    if refused:
        with pytest.raises(UserError, match=refused), supervising(folder, job, Stop(), print):  # type: ignore[arg-type]
            pass
    else:
        with supervising(folder, job, Stop(), said.append) as (_, taken):  # type: ignore[arg-type]
            # The servers that are left have the token that they had.
            assert taken == replace(job, token="theirs")
            assert folder.read() == taken
        assert "run TrimMoE next" in said[0]
    os.close(lock)


def _python_path() -> list[str]:
    found = os.environ.get("PYTHONPATH")
    return [found] if found else []


NEXT_VERSION = """
import trimmoe
trimmoe.__version__ = "9.9"
from trimmoe.runtime.wire import protocol
protocol.WIRE_VERSION = protocol.Version({major}, {minor})
"""


@pytest.mark.slow
def test_trimmoe_serve_of_the_next_version_takes_servers_over_one_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_files(tmp_path, ("desk", "attic"))
    port = free_ports(110)
    given = {
        "cluster": files.cluster,
        "model": files.model,
        "profile": files.profile,
        "plan": files.plan,
        "port_base": port,
        "spare": False,
    }
    command = [STAND_IN, "echo", *(f"{key}={value}" for key, value in given.items())]
    with Serving(command, cache=tmp_path / "cache") as serving:
        serving.said("Ready")
        serving.process.kill()
        serving.ended()
    folder = RunFolder.at(port)
    pids = [folder.pid(index) for index in range(2)]
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(NEXT_VERSION.format(major=HERE, minor=NEXT))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(site), *_python_path()]))
    # The next version is there from its process's first moment on.
    with Serving(command, cache=tmp_path / "cache", quickly=False) as serving:
        serving.said("taking them over")
        serving.said("Ready")
        serving.said("Server attic moves to TrimMoE 9.9.")
        # The first one has met the other, which was still of the version before.
        assert answers(port) == 200
        assert folder.pid(0) != pids[0]
        deadline_s = time.monotonic() + PATIENCE_S
        while folder.pid(1) in (pids[1], None):
            assert time.monotonic() < deadline_s, "the other one moves too"
            time.sleep(0.1)
        await_answer(port + 1)
        serving.process.send_signal(signal.SIGINT)
        assert serving.ended() == 0
