"""The head's end: who has joined, what they are to run, and the word that ends them.

Nothing that serves depends on it. When the head goes, members go on with what they have; when it
comes back they say what they run, and if that is what it would have them run, nothing happens.
"""

from __future__ import annotations

import hmac
import itertools
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import zmq
from zmq.auth.thread import ThreadAuthenticator

import trimmoe
from trimmoe.core.errors import UserError
from trimmoe.runtime.launch.deployment import (
    Deployment,
    End,
    Hello,
    Refused,
    Timed,
    ToMember,
    Wanted,
    Wish,
    decode_to_head,
    encode,
    head_keys,
    member_keys,
)
from trimmoe.runtime.launch.handles import ServerGone
from trimmoe.runtime.launch.status import ServerStatus
from trimmoe.runtime.wire.protocol import WIRE_VERSION

AWAY_S = 6.0
"""Of silence, until a member is taken for gone."""
_POLL_MS = 100
_LARGEST_BYTES = 1 << 20
"""Of a member's word."""
_RESEND_S = 30.0
"""What a member gets to begin what it was sent."""


@dataclass(slots=True)
class _Member:
    """One machine that has joined."""

    hello: Hello
    heard_s: float
    sent_s: dict[str, float] = field(default_factory=dict)
    """When it was sent what, by the clock."""

    @property
    def is_there(self) -> bool:
        return time.monotonic() - self.heard_s < AWAY_S


class Members:
    """Listens while it is entered; a thread of its own answers."""

    def __init__(self, token: str, address: str, port: int, *, own: Sequence[str]) -> None:
        """`own` are the servers of the head's machine. Raises `UserError`."""
        self._lock = threading.Lock()
        self._members: dict[bytes, _Member] = {}
        self._own = frozenset(own)
        self._deployments: dict[str, Deployment] = {}
        self._known = self._ending = False
        self._numbers = itertools.count(1)
        self._wishes: dict[int, Wish] = {}
        self._timed: dict[int, Timed] = {}
        self._closed = threading.Event()
        self._context = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._socket = self._listening(token, f"tcp://{address}:{port}")
        self._thread = threading.Thread(target=self._run, name="members", daemon=True)

    def __enter__(self) -> Members:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        self._socket.close(linger=1000)
        self._authenticator.stop()
        self._context.term()

    def joined(self) -> dict[str, Hello]:
        """Those that are there, by each of their servers."""
        with self._lock:
            there = [each.hello for each in self._members.values() if each.is_there]
        return {name: hello for hello in there for name in hello.servers}

    def want(self, deployments: Mapping[str, Deployment]) -> None:
        """What all members are to run from now on, by identity, and nothing else."""
        with self._lock:
            self._known = True
            self._deployments = dict(deployments)

    def end(self) -> None:
        """Have all members end."""
        with self._lock:
            self._ending = True

    def status_of(self, deployment: str, server: str) -> ServerStatus | None:
        """How a member's server is; None if nothing is known yet. Raises `ServerGone`."""
        with self._lock:
            hello = self._of(server)
        if hello is None:
            raise ServerGone("its machine is away")
        for report in hello.reports:
            if (report.deployment, report.name) == (deployment, server):
                return report.status
        return None

    def begin_measuring(self, deployment: str, server: str) -> int:
        """Have a server time itself; the number to ask for its answer by."""
        number = next(self._numbers)
        with self._lock:
            self._wishes[number] = Wish(server=server, deployment=deployment, number=number)
        return number

    def measured(self, number: int, patience_s: float, look_s: float = 0.1) -> Timed | None:
        """What came of it; None if it is not through in time."""
        end_s = time.monotonic() + patience_s
        while time.monotonic() < end_s:
            with self._lock:
                if number in self._timed:
                    return self._timed.pop(number)
            time.sleep(look_s)
        with self._lock:
            self._wishes.pop(number, None)
        return None

    def _of(self, server: str) -> Hello | None:
        """Who has a server, if it is there."""
        found = [
            each
            for each in self._members.values()
            if each.is_there and server in each.hello.servers
        ]
        return max(found, key=lambda each: each.heard_s).hello if found else None

    def _listening(self, token: str, address: str) -> zmq.Socket[bytes]:
        keys, known = head_keys(token), member_keys(token).public
        self._authenticator.start()
        self._authenticator.configure_curve_callback(
            domain="*", credentials_provider=_Admitted(known)
        )
        socket = self._context.socket(zmq.ROUTER)
        socket.curve_server = True
        socket.curve_secretkey, socket.curve_publickey = keys.secret, keys.public
        socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST_BYTES)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            self._authenticator.stop()
            self._context.term()
            raise UserError(
                f"The head cannot listen at {address.removeprefix('tcp://')} ({error.strerror}); "
                "free the port or choose another --head-port, and check --address."
            ) from error
        return socket

    def _run(self) -> None:
        while not self._closed.is_set():
            if self._socket.poll(_POLL_MS):
                peer, *frames = self._socket.recv_multipart()
                hello = decode_to_head(frames[0]) if frames else None
                if hello is None:
                    continue
                with self._lock:
                    answer = self._answer(peer, hello)
                self._tell(peer, answer)
        # Those who have not asked since the end was decided hear of it now.
        if self._ending:
            for peer in self._members:
                self._tell(peer, End())

    def _tell(self, peer: bytes, message: ToMember) -> None:
        self._socket.send_multipart([peer, encode(message)])

    def _answer(self, peer: bytes, hello: Hello) -> ToMember:
        if (reason := self._objection(peer, hello)) is not None:
            return Refused(reason=reason)
        now_s = time.monotonic()
        member = self._members.get(peer) or _Member(hello, now_s)
        member.hello, member.heard_s = hello, now_s
        # Whoever had these servers before is this machine, started again.
        self._members = {
            known: each
            for known, each in self._members.items()
            if not set(each.hello.servers) & set(hello.servers)
        } | {peer: member}
        self._hear(hello.timed)
        if self._ending:
            return End()
        return Wanted(
            known=self._known,
            deployments=tuple(self._deployments),
            fresh=self._due(member, now_s),
            wishes=tuple(each for each in self._wishes.values() if each.server in hello.servers),
        )

    def _due(self, member: _Member, now_s: float) -> Deployment | None:
        """What a member is to have and has not."""
        for identity, deployment in self._deployments.items():
            before_s = member.sent_s.get(identity)
            if identity in member.hello.runs or not set(member.hello.servers) & set(
                deployment.machines
            ):
                continue
            if before_s is None or now_s - before_s > _RESEND_S:
                member.sent_s[identity] = now_s
                return deployment
        return None

    def _hear(self, timed: Sequence[Timed]) -> None:
        for each in timed:
            if self._wishes.pop(each.number, None) is not None:
                self._timed[each.number] = each

    def _objection(self, peer: bytes, hello: Hello) -> str | None:
        """Why somebody cannot join."""
        if hello.wire != WIRE_VERSION.major:
            return (
                f"This machine runs TrimMoE {hello.version}, whose servers speak version "
                f"{hello.wire} of the protocol between servers, the head {trimmoe.__version__} "
                f"with version {WIRE_VERSION.major}: they cannot serve together; install the same "
                "release on both."
            )
        taken = set(self._own)
        for known, each in self._members.items():
            # From one address it is the same machine, started again.
            elsewhere = known != peer and each.hello.address != hello.address
            if elsewhere and each.is_there:
                taken |= set(each.hello.servers)
        twice = sorted(taken.intersection(hello.servers))
        if twice:
            return f"Another machine is server {twice[0]} already; give --server another name."
        return None


class _Admitted:
    """Those who have the members' key."""

    def __init__(self, known: bytes) -> None:
        self._known = known

    def callback(self, _domain: str, key: bytes) -> bool:
        return hmac.compare_digest(key, self._known)
