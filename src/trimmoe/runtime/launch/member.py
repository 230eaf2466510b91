"""A machine that joins: its line to the head.

What it was given last is kept on disk. A head that goes away is waited for while the servers serve;
after a restart of this machine they start without it.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import zmq
from zmq.utils.monitor import parse_monitor_message

import trimmoe
from trimmoe.core.cores import available_cores
from trimmoe.core.errors import UserError
from trimmoe.core.private import read_private, write_private
from trimmoe.models.embedded.materialise import default_cache_dir
from trimmoe.runtime.launch.deployment import (
    Deployment,
    End,
    Hello,
    Refused,
    Report,
    Timed,
    Wanted,
    decode_deployment,
    decode_to_member,
    encode,
    head_keys,
    member_keys,
)
from trimmoe.runtime.launch.naming import own_end
from trimmoe.runtime.probe import free_bytes
from trimmoe.runtime.wire.protocol import WIRE_VERSION

Say = Callable[[str], None]
Told = Callable[[], tuple[tuple[str, ...], tuple[Report, ...], tuple[Timed, ...]]]
"""What to tell the head: what runs, how it is, and what was timed."""
_HELLO_S = 1.0
_MET = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_REFUSALS = 4
"""Connections without a handshake, until a machine takes it that the head has another token."""
_AWAY_S = 10.0
"""Of silence, until a head is taken for gone."""


class Membership:
    """The line to the head; a thread of its own keeps it open while it is entered."""

    def __init__(
        self, token: str, head: str, servers: tuple[str, ...], say: Say, told: Told
    ) -> None:
        """`head` is host:port. Raises `UserError` for a token that is too short."""
        self._say, self._servers, self._head, self._told = say, servers, head, told
        self._address = address_towards(head)
        self._memory_bytes = free_bytes(torch.device("cpu"))
        self._news = threading.Event()
        self._closed = threading.Event()
        self.wanted: Wanted | None = None
        """What the head said last, once it knew."""
        self.given: dict[str, Deployment] = {}
        """The deployments that it has sent and still wants, by identity."""
        self._kept_out = 0
        self.heard = False
        """Whether the head has ever answered."""
        self.refused = ""
        """Why it does not want this machine."""
        self.ended = False
        """Whether the operator ended the cluster at the head."""
        self._context = zmq.Context()
        self._socket = self._connected(token)
        self._monitor = self._socket.get_monitor_socket(_MET)
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)

    def __enter__(self) -> Membership:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=200)
        self._context.term()

    @property
    def is_over(self) -> bool:
        return self.ended or bool(self.refused)

    def wait(self, patience_s: float) -> None:
        """Until there is news, or so long."""
        self._news.wait(patience_s)
        self._news.clear()

    def _connected(self, token: str) -> zmq.Socket[bytes]:
        keys = member_keys(token)
        line = self._context.socket(zmq.DEALER)
        line.curve_serverkey = head_keys(token).public
        line.curve_secretkey, line.curve_publickey = keys.secret, keys.public
        # The same machine to the head after a connection has broken.
        line.setsockopt(zmq.ROUTING_ID, b"m" + secrets.token_bytes(15))
        # Little of what could not be said in time is said late.
        line.setsockopt(zmq.SNDHWM, 2)
        line.setsockopt(zmq.RECONNECT_IVL, 200)
        line.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        line.connect(f"tcp://{self._head}")
        return line

    def _run(self) -> None:
        heard_s, away = time.monotonic(), False
        while not self._closed.is_set():
            self._greet()
            if self._socket.poll(round(_HELLO_S * 1000)):
                heard_s = time.monotonic()
                if away and self.heard:
                    self._say(f"The head at {self._head} is back.")
                away = False
                self._take(self._socket.recv())
                self._closed.wait(_HELLO_S)
            elif not self.heard and self._is_kept_out():
                self.refused = (
                    f"The head at {self._head} does not let this machine in; check the cluster "
                    "token."
                )
                self._news.set()
                return
            elif not away and time.monotonic() - heard_s > _AWAY_S:
                away = True
                goes_on = (
                    "is away; the servers here go on without it" if self.heard else "is silent"
                )
                self._say(f"The head at {self._head} {goes_on}; it is tried again and again.")

    def _greet(self) -> None:
        runs, reports, timed = self._told()
        hello = Hello(
            version=trimmoe.__version__,
            wire=WIRE_VERSION.major,
            servers=self._servers,
            address=self._address,
            memory_bytes=self._memory_bytes,
            cores=available_cores(),
            runs=runs,
            reports=reports,
            timed=timed,
        )
        with contextlib.suppress(zmq.Again):
            self._socket.send(encode(hello), zmq.NOBLOCK)

    def _take(self, content: bytes) -> None:
        message = decode_to_member(content)
        if message is None:
            return
        if not self.heard:
            self.heard = True
            if not isinstance(message, Refused):
                self._say(f"Joined {self._head} as {', '.join(self._servers)}.")
        match message:
            case Refused(reason=reason):
                self.refused = reason
            case End():
                self.ended = True
            case Wanted(known=True):
                given = {
                    one: each for one, each in self.given.items() if one in message.deployments
                }
                if message.fresh is not None:
                    given[message.fresh.identity] = message.fresh
                self.given, self.wanted = given, message
            case _:
                return
        self._news.set()

    def _is_kept_out(self) -> bool:
        """Whether the head is there, but ends every connection before a word is said."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            met = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._kept_out = 0 if met else self._kept_out + 1
        return self._kept_out >= _REFUSALS


def kept_at(who: str, servers: tuple[str, ...]) -> Path:
    """Where this machine keeps what it runs for a head, or as one."""
    name = "".join(c if c.isalnum() or c in "-." else "_" for c in "-".join((who, *servers)))
    return default_cache_dir() / "joined" / name


def keep(deployment: Deployment, folder: Path) -> None:
    """For a start without the head; the token is not in it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_private(folder / "deployment", encode(deployment))


def kept(folder: Path) -> Deployment | None:
    """What was kept last; None if nothing was, or another version's. Raises `UserError` if others
    can read it: there are API keys in it."""
    try:
        return decode_deployment(read_private(folder / "deployment"))
    except OSError:
        return None


def address_towards(head: str) -> str:
    """The address of this machine that the head sees. Raises `UserError`."""
    host, _, port = head.rpartition(":")
    try:
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        family, _, _, _, at = infos[0]
        return own_end(family, at)
    except (OSError, ValueError) as error:
        raise UserError(
            f"The head's address {head} cannot be found ({error}); check --join."
        ) from error
