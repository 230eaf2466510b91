"""The head's end: who has joined, what they run, and the word that ends them.

Nothing that serves depends on it. When the head goes, members go on with what they have; when it
comes back they say what they run, and if that is what it would have them run, nothing happens.
"""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

import trimmoe
from trimmoe.core.errors import UserError
from trimmoe.runtime.launch.deployment import (
    Deployment,
    End,
    Heard,
    Hello,
    Refused,
    ToMember,
    decode_to_head,
    encode,
    head_keys,
    member_keys,
)
from trimmoe.runtime.launch.handles import ServerGone
from trimmoe.runtime.launch.status import Phase, ServerStatus

AWAY_S = 6.0
"""Of silence, until a member is taken for gone."""
_POLL_MS = 100
_LARGEST_BYTES = 1 << 20
"""Of a member's word."""
_RESEND_S = 30.0
"""What a member gets to say that it runs what it was sent."""


@dataclass(slots=True)
class _Member:
    """One machine that has joined."""

    peer: bytes
    hello: Hello
    heard_s: float
    sent: str = ""
    """The deployment that it was last sent, `sent_s` ago on the clock."""
    sent_s: float = 0.0


class Members:
    """Listens from when it is entered; a thread of its own answers."""

    def __init__(self, token: str, address: str, port: int, *, own: Sequence[str]) -> None:
        """`own` are the servers of the head's machine. Raises `UserError`."""
        self._lock = threading.Lock()
        self._members: dict[bytes, _Member] = {}
        self._own = frozenset(own)
        self._deployment: Deployment | None = None
        self._identity = ""
        self._ending = False
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

    def machines(self) -> dict[str, str]:
        """The address of every joined server's machine, of those that are there."""
        now_s = time.monotonic()
        with self._lock:
            there = [each for each in self._members.values() if now_s - each.heard_s < AWAY_S]
            return {name: each.hello.address for each in there for name in each.hello.servers}

    def deploy(self, deployment: Deployment) -> None:
        """What all members are to run from now on."""
        with self._lock:
            self._deployment, self._identity = deployment, deployment.identity

    def end(self) -> None:
        """Have all members end."""
        with self._lock:
            self._ending = True

    def status_of(self, server: str) -> ServerStatus | None:
        """How a member's server is; None if it does not run what it should yet. Raises
        `ServerGone`."""
        with self._lock:
            member = self._of(server)
            identity = self._identity
        if member is None or time.monotonic() - member.heard_s > AWAY_S:
            raise ServerGone("its machine is away")
        if member.hello.runs != identity:
            return None
        if member.hello.error:
            return ServerStatus(phase=Phase.FAILED, pid=0, error=member.hello.error)
        report = next((each for each in member.hello.reports if each.name == server), None)
        try:
            return None if report is None else report.status
        except ValueError:
            return None

    def _of(self, server: str) -> _Member | None:
        found = [each for each in self._members.values() if server in each.hello.servers]
        return max(found, key=lambda each: each.heard_s, default=None)

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
            socket.close()
            self._authenticator.stop()
            raise UserError(
                f"The head cannot listen at {address.removeprefix('tcp://')} ({error.strerror}); "
                "free the port or choose another --head-port, and check --address."
            ) from error
        return socket

    def _run(self) -> None:
        while not self._closed.is_set():
            if self._socket.poll(_POLL_MS):
                peer, *frames = self._socket.recv_multipart()
                try:
                    hello = decode_to_head(frames[0])
                except (msgspec.DecodeError, IndexError):
                    continue
                self._tell(peer, self._answer(peer, hello))
        # Those who have not asked since the end was decided hear of it now.
        with self._lock:
            if self._ending:
                for peer in self._members:
                    self._tell(peer, End())

    def _tell(self, peer: bytes, message: ToMember) -> None:
        self._socket.send_multipart([peer, encode(message)])

    def _answer(self, peer: bytes, hello: Hello) -> ToMember:
        now_s = time.monotonic()
        with self._lock:
            if (reason := self._objection(peer, hello, now_s)) is not None:
                return Refused(reason=reason)
            member = self._members.setdefault(peer, _Member(peer, hello, now_s))
            member.hello, member.heard_s = hello, now_s
            self._members = {
                known: each
                for known, each in self._members.items()
                if known == peer or not set(each.hello.servers) & set(hello.servers)
            }
            if self._ending:
                return End()
            due = member.sent != self._identity or now_s - member.sent_s > _RESEND_S
            if self._deployment is None or hello.runs == self._identity or not due:
                return Heard()
            member.sent, member.sent_s = self._identity, now_s
            return self._deployment

    def _objection(self, peer: bytes, hello: Hello, now_s: float) -> str | None:
        """Why somebody cannot join."""
        if hello.version != trimmoe.__version__:
            return (
                f"This machine runs TrimMoE {hello.version}, the head {trimmoe.__version__}; "
                "install the same version on both."
            )
        taken = set(self._own)
        for known, each in self._members.items():
            # From one address it is the same machine, started again.
            elsewhere = known != peer and each.hello.address != hello.address
            if elsewhere and now_s - each.heard_s < AWAY_S:
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


class RemoteHandle:
    """`ServerHandle` of a server that a member's own supervisor watches."""

    def __init__(self, name: str, members: Members) -> None:
        self.name, self._members = name, members

    def status(self, patience_s: float) -> ServerStatus | None:
        return self._members.status_of(self.name)

    def restart(self) -> None:
        """Its own supervisor sees to that."""

    def stop(self, patience_s: float) -> None:
        self._members.end()

    def kill(self, patience_s: float) -> None:
        """Not this machine's."""


def remote_handles(
    members: Members, machines: Mapping[str, str], own: Sequence[str]
) -> list[RemoteHandle]:
    """Those of all servers but the head's own."""
    return [RemoteHandle(name, members) for name in machines if name not in own]
