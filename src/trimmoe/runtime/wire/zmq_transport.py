"""Servers on ZeroMQ: one ROUTER bound per server to hear all, one DEALER per peer to speak to it.

The event loop reads the sockets by their descriptors, several messages a turn; that is as fast as
`zmq.asyncio` and a thread of our own is no faster (benchmarks/bench_hop.py). ZeroMQ's thread moves
the bytes, so that one stalled peer does not hold up another. With a keyring everything is encrypted
and only the cluster's public keys are admitted; without one, only loopback is allowed unless
`allow_plain` says otherwise.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import zmq
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from trimmoe.core.errors import UserError
from trimmoe.runtime.wire.base import Arrived, Dropped, Frame
from trimmoe.runtime.wire.keys import Keyring

ZAP_DOMAIN = b"trimmoe"
BATCH = 64
"""Messages read in a row before the event loop gets a turn."""
REFUSALS = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "connection not admitted",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "connection not of this protocol",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "connection not of this protocol",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SocketSettings:
    """How the sockets behave."""

    queue_messages: int = 4096
    """What ZeroMQ holds per peer; beyond, `post` refuses. More than any window."""
    largest_frame_bytes: int = 65 << 20
    """A connection that announces more is closed before anything is allocated. Above the largest
    tensor by what encryption adds."""
    reconnect_s: float = 0.05
    slowest_reconnect_s: float = 1.0
    handshake_s: float = 10.0


class ZmqCarrier:
    """Frames over ZeroMQ sockets.

    `bind` is `tcp://host:port`, port 0 for any free one. Raises `UserError` when started on, or
    connected to, an address beyond loopback with neither a keyring nor `allow_plain`.
    """

    def __init__(
        self,
        name: str,
        bind: str = "tcp://127.0.0.1:0",
        *,
        keyring: Keyring | None = None,
        allow_plain: bool = False,
        settings: SocketSettings | None = None,
    ) -> None:
        assert keyring is None or keyring.name == name
        self._name = name
        self._bind = bind
        self._keyring = keyring
        self._allow_plain = allow_plain
        self._settings = settings or SocketSettings()
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._dealers: dict[str, zmq.Socket[bytes]] = {}
        self._addresses: dict[str, str] = {}
        self._authenticator: _Authenticator | None = None
        self._address = ""

    @property
    def name(self) -> str:
        return self._name

    @property
    def address(self) -> str:
        return self._address

    async def start(self, arrived: Arrived, dropped: Dropped) -> None:
        self._check_address(self._bind)
        self._arrived, self._dropped = arrived, dropped
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        try:
            if self._keyring is not None:
                # Before the socket is bound: without an authenticator any key would be admitted.
                self._authenticator = _Authenticator(self._context, self._keyring)
                self._authenticator.start()
            self._router = self._socket(zmq.ROUTER)
            self._monitor = self._router.get_monitor_socket(sum(set(REFUSALS)))
            self._bind_router()
        except BaseException:
            await self.close()
            raise
        self._loop.add_reader(self._router.fileno(), self._read)
        self._loop.add_reader(self._monitor.fileno(), self._read_monitor)
        self._read_monitor()
        self._read()

    def connect(self, peer: str, address: str) -> None:
        self._check_address(address)
        if self._keyring is not None and peer not in self._keyring.public:
            raise UserError(f"There is no public key of {peer}; add it to the keyring.")
        self._addresses[peer] = address
        self.reset(peer)

    def post(self, peer: str, frames: Sequence[Frame]) -> bool:
        try:
            self._dealers[peer].send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def reset(self, peer: str) -> None:
        old = self._dealers.pop(peer, None)
        if old is not None:
            old.close()
        dealer = self._dealers[peer] = self._socket(zmq.DEALER, peer)
        dealer.connect(self._addresses[peer])

    async def close(self) -> None:
        if self._context is None:
            return
        context, self._context = self._context, None
        for name in ("_monitor", "_router"):
            socket: zmq.Socket[bytes] | None = getattr(self, name, None)
            if socket is not None and not socket.closed:
                self._loop.remove_reader(socket.fileno())
        if self._authenticator is not None:
            self._authenticator.stop()
            await asyncio.sleep(0)  # its task ends
        for dealer in self._dealers.values():
            dealer.close()
        self._dealers.clear()
        context.destroy(linger=0)

    def _socket(self, kind: int, peer: str | None = None) -> zmq.Socket[bytes]:
        """A socket with our settings; a DEALER proves itself to `peer`, a ROUTER asks for proof."""
        assert self._context is not None, "not started, or closed"
        settings = self._settings
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.sndhwm = socket.rcvhwm = settings.queue_messages
        socket.maxmsgsize = settings.largest_frame_bytes
        address = self._bind if peer is None else self._addresses[peer]
        socket.ipv6 = "[" in address
        socket.handshake_ivl = round(settings.handshake_s * 1e3)
        socket.reconnect_ivl = round(settings.reconnect_s * 1e3)
        socket.reconnect_ivl_max = round(settings.slowest_reconnect_s * 1e3)
        if self._keyring is not None:
            socket.curve_publickey = self._keyring.own.public
            socket.curve_secretkey = self._keyring.own.secret
            if peer is None:
                socket.curve_server = True
                socket.zap_domain = ZAP_DOMAIN
            else:
                socket.curve_serverkey = self._keyring.public[peer]
        return socket

    def _bind_router(self) -> None:
        address = self._bind.removesuffix(":0") + ":*" if self._bind.endswith(":0") else self._bind
        try:
            self._router.bind(address)
        except zmq.ZMQError as error:
            raise UserError(
                f"{self._name} cannot listen on {self._bind} ({error.strerror}); "
                "free the port or choose another."
            ) from None
        self._address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)

    def _check_address(self, address: str) -> None:
        parts = urlsplit(address)
        if parts.scheme != "tcp" or parts.hostname is None or parts.port is None:
            raise UserError(f"{address!r} is no address; write tcp://host:port.")
        if self._keyring is None and not self._allow_plain and not _is_loopback(parts.hostname):
            raise UserError(
                f"{address} is beyond this machine and nothing would be encrypted; "
                "give all servers the cluster token, or allow plain connections explicitly."
            )

    def _read(self) -> None:
        """Deliver what has come. The descriptor tells of changes only: read until there is none."""
        if self._context is None:
            return
        again = True
        try:
            for _ in range(BATCH):
                frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
                self._deliver(frames)
        except zmq.Again:
            again = False
        finally:
            if again:
                self._loop.call_soon(self._read)

    def _deliver(self, frames: Sequence[zmq.Frame]) -> None:
        origin: str | None = None
        if self._keyring is not None:
            origin = str(frames[0].get("User-Id"))
        self._arrived(origin, [frame.buffer for frame in frames[1:]])

    def _read_monitor(self) -> None:
        if self._context is None:
            return
        while True:
            try:
                parts = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._dropped(REFUSALS[zmq.Event(parse_monitor_message(parts)["event"])])


class _Authenticator(AsyncioAuthenticator):
    """Admits the keys of a keyring; what arrives is marked with the name of the key's owner."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keyring: Keyring) -> None:
        log = logging.getLogger(__name__)
        super().__init__(context, log=log)
        self._keyring = keyring
        self.configure_curve_callback(ZAP_DOMAIN.decode(), credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this public key (Z85) is admitted."""
        return self._keyring.owner(key) is not None

    def curve_user_id(self, client_public_key: bytes) -> str:
        """Name of the server a raw public key belongs to."""
        owner = self._keyring.owner(z85.encode(client_public_key))
        assert owner is not None, "admitted above"
        return owner


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
