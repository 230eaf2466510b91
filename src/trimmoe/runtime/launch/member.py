"""A machine that joins: it offers its servers to a head, and runs what it is given.

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

import msgspec
import zmq
from zmq.utils.monitor import parse_monitor_message

import trimmoe
from trimmoe.core.errors import UserError
from trimmoe.models.embedded.materialise import default_cache_dir
from trimmoe.runtime.launch.deployment import (
    Deployment,
    End,
    Hello,
    Refused,
    Report,
    decode_to_member,
    encode,
    head_keys,
    member_keys,
)
from trimmoe.runtime.launch.status import ServerStatus

Say = Callable[[str], None]
_HELLO_S = 1.0
_MET = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_REFUSALS = 4
"""Connections without a handshake, until a machine takes it that the head has another token."""
_AWAY_S = 10.0
"""Of silence, until a head is taken for gone."""
ALONE_S = 10.0
"""How long a head is waited for before servers start with what is on disk."""


class Membership:
    """The line to the head; a thread of its own keeps it open."""

    def __init__(self, token: str, head: str, servers: tuple[str, ...], say: Say) -> None:
        """`head` is host:port. Raises `UserError` for a token that is too short."""
        self._say, self._servers, self._head = say, servers, head
        self._address = address_towards(head)
        self._lock = threading.Lock()
        self._news = threading.Event()
        self._closed = threading.Event()
        self._given: Deployment | None = None
        self._runs, self._error = "", ""
        self._statuses: Callable[[], dict[str, ServerStatus | None]] = dict
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
        self._on_change: Callable[[], None] = lambda: None
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
    def given(self) -> Deployment | None:
        """What this machine is to run."""
        with self._lock:
            return self._given

    @property
    def is_over(self) -> bool:
        return self.ended or bool(self.refused)

    def on_change(self, callback: Callable[[], None]) -> None:
        """What to call, in the line's thread, when there is something else to run or no more."""
        self._on_change = callback

    def running(
        self, deployment: Deployment, statuses: Callable[[], dict[str, ServerStatus | None]]
    ) -> None:
        """Tell the head from now on that this is what runs here, and how."""
        with self._lock:
            self._runs, self._error, self._statuses = deployment.identity, "", statuses

    def failed(self, error: str) -> None:
        """Tell the head from now on why nothing runs here."""
        with self._lock:
            self._error = error

    def _connected(self, token: str) -> zmq.Socket[bytes]:
        keys = member_keys(token)
        line = self._context.socket(zmq.DEALER)
        line.curve_serverkey = head_keys(token).public
        line.curve_secretkey, line.curve_publickey = keys.secret, keys.public
        # The same machine to the head after a connection has broken.
        line.setsockopt(zmq.ROUTING_ID, b"m" + secrets.token_bytes(15))
        # What could not be said in time is not said late.
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
                if away:
                    self._say(f"The head at {self._head} is back.")
                away = False
                self._take(self._socket.recv())
                self._closed.wait(_HELLO_S)
            elif not self.heard and self._is_kept_out():
                self.refused = (
                    f"The head at {self._head} does not let this machine in; check the cluster "
                    "token."
                )
                self._tell()
                return
            elif self.heard and not away and time.monotonic() - heard_s > _AWAY_S:
                away = True
                self._say(f"The head at {self._head} is away; the servers here go on without it.")

    def _greet(self) -> None:
        with self._lock:
            reports = [
                Report.of(name, status)
                for name, status in self._statuses().items()
                if status is not None
            ]
            hello = Hello(
                version=trimmoe.__version__,
                servers=self._servers,
                address=self._address,
                runs=self._runs,
                error=self._error,
                reports=tuple(reports),
            )
        with contextlib.suppress(zmq.Again):
            self._socket.send(encode(hello), zmq.NOBLOCK)

    def _take(self, content: bytes) -> None:
        try:
            message = decode_to_member(content)
        except msgspec.DecodeError:
            return
        if not self.heard:
            self.heard = True
            if not isinstance(message, Refused):
                self._say(f"Joined {self._head} as {', '.join(self._servers)}.")
        match message:
            case Deployment():
                with self._lock:
                    self._given = message
            case Refused(reason=reason):
                self.refused = reason
            case End():
                self.ended = True
            case _:
                return
        self._tell()

    def _is_kept_out(self) -> bool:
        """Whether the head is there, but ends every connection before a word is said."""
        while self._monitor.poll(0):
            event = parse_monitor_message(self._monitor.recv_multipart())["event"]
            met = event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._kept_out = 0 if met else self._kept_out + 1
        return self._kept_out >= _REFUSALS

    def _tell(self) -> None:
        self._news.set()
        self._on_change()

    def wait(self, patience_s: float) -> None:
        """Until there is news, or so long."""
        self._news.wait(patience_s)
        self._news.clear()


def kept_at(head: str, servers: tuple[str, ...]) -> Path:
    """Where this machine keeps what the head gave it."""
    name = "".join(c if c.isalnum() or c in "-." else "_" for c in "-".join((head, *servers)))
    return default_cache_dir() / "joined" / name


def keep(deployment: Deployment, folder: Path) -> None:
    """For a start without the head; the token is not in it."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    fresh = folder / "deployment.new"
    fresh.touch(mode=0o600)
    fresh.write_bytes(encode(deployment))
    fresh.replace(folder / "deployment")


def kept(folder: Path) -> Deployment | None:
    """What was given last; None if nothing was, or another version's."""
    try:
        found = decode_to_member((folder / "deployment").read_bytes())
    except (OSError, msgspec.DecodeError):
        return None
    return found if isinstance(found, Deployment) else None


def address_towards(head: str) -> str:
    """The address of this machine that the head sees. Raises `UserError`."""
    host, _, port = head.rpartition(":")
    try:
        infos = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        family, kind, _, _, at = infos[0]
        with socket.socket(family, kind) as probe:
            probe.connect(at)  # Sends nothing.
            return str(probe.getsockname()[0])
    except (OSError, ValueError) as error:
        raise UserError(
            f"The head's address {head} cannot be found ({error}); check --join."
        ) from error
