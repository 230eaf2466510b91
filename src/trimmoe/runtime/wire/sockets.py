"""Servers of one machine on Unix sockets, one connection in each direction.

What is sent is in the socket, and its receiver awake, when `post` returns. ZeroMQ hands it to a
thread, which waits for the processor while the server that sent it goes on computing.

A message on a connection: its number of frames, the size of each, and the frames, padded so that
each begins where a tensor may lie. Whoever can enter the folder of the sockets is one user, so that
nothing is encrypted and nobody proves who he is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from trimmoe.core.errors import UserError
from trimmoe.core.private import require_private
from trimmoe.runtime.wire.base import Arrived, Dropped, Frame

SCHEME = "unix"
ALIGNMENT = 8
MOST_FRAMES = 256
READ_BYTES = 1 << 18
"""Read at once; then other connections have their turn."""
_COUNT = struct.Struct("<Q")
_PADDING = bytes(ALIGNMENT)
NOT_OURS = "connection not of this protocol"


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamSettings:
    """How the sockets behave."""

    queue_bytes: int = 256 << 20
    """What is kept for a peer that does not read; beyond, `post` refuses. More than any window."""
    early_messages: int = 16
    """What is kept for a peer that is not there yet; what was posted before those is lost."""
    largest_frame_bytes: int = 65 << 20
    """A connection that announces more is closed before anything is allocated."""
    reconnect_s: float = 0.02
    slowest_reconnect_s: float = 0.5


class SocketCarrier:
    """Frames over Unix sockets; `bind` is `unix://` and the path of a socket.

    Raises `UserError` when started on, or connected to, a socket in a folder that others can enter.
    """

    def __init__(self, name: str, bind: str, *, settings: StreamSettings | None = None) -> None:
        self._name, self._bind = name, bind
        self._settings = settings or StreamSettings()
        self._paths: dict[str, Path] = {}
        self._outgoing: dict[str, _Outgoing] = {}
        self._incoming: set[_Incoming] = set()
        self._listening: socket.socket | None = None

    @property
    def name(self) -> str:
        return self._name

    @property
    def address(self) -> str:
        return self._bind

    async def start(self, arrived: Arrived, dropped: Dropped) -> None:
        path = path_of(self._bind)
        self._arrived, self._dropped = arrived, dropped
        self._loop = asyncio.get_running_loop()
        listening = socket.socket(socket.AF_UNIX)
        listening.setblocking(False)
        try:
            # What a server that was killed has left there.
            path.unlink(missing_ok=True)
            listening.bind(str(path))
            listening.listen()
        except OSError as error:
            listening.close()
            raise UserError(
                f"{self._name} cannot listen on {path} ({error.strerror}); choose another folder."
            ) from None
        self._listening = listening
        self._loop.add_reader(listening, self._accept, listening)

    def connect(self, peer: str, address: str) -> None:
        self._paths[peer] = path_of(address)
        self.reset(peer)

    def post(self, peer: str, frames: Sequence[Frame]) -> bool:
        return self._outgoing[peer].post(packed(frames))

    def reset(self, peer: str) -> None:
        if (old := self._outgoing.pop(peer, None)) is not None:
            old.close()
        self._outgoing[peer] = _Outgoing(self._loop, self._paths[peer], self._settings)

    async def close(self) -> None:
        if self._listening is None:
            return
        self._loop.remove_reader(self._listening)
        self._listening.close()
        self._listening = None
        path_of(self._bind).unlink(missing_ok=True)
        for each in [*self._outgoing.values(), *self._incoming]:
            each.close()
        self._outgoing.clear()
        self._incoming.clear()

    def _accept(self, listening: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listening.accept()
            connection.setblocking(False)
            self._incoming.add(_Incoming(self._loop, connection, self._settings, self._came, self))

    def _came(self, frames: list[memoryview]) -> None:
        self._arrived(None, frames)

    def ended(self, incoming: _Incoming, reason: str = "") -> None:
        """A connection is over, for this reason if it was not the other side's wish."""
        self._incoming.discard(incoming)
        if reason:
            self._dropped(reason)


class _Outgoing:
    """The connection to a peer: made at once or as soon as the peer listens, and again if lost."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, path: Path, settings: StreamSettings
    ) -> None:
        self._loop, self._path, self._settings = loop, path, settings
        self._socket: socket.socket | None = None
        self._left: deque[bytes] = deque()
        """What the socket has not taken yet."""
        self._left_bytes = 0
        self._early: deque[bytes] | None = deque(maxlen=settings.early_messages)
        """None once there was a connection."""
        self._wait_s = settings.reconnect_s
        self._retrying: asyncio.TimerHandle | None = None
        self._connect()

    def post(self, parts: list[Frame]) -> bool:
        """Send a message; False if there is no connection, or too much waits for it."""
        if self._socket is None:
            if self._early is None:
                return False
            self._early.append(b"".join(parts))
            return True
        if self._left:
            return self._keep(b"".join(parts))
        try:
            sent = self._socket.sendmsg(parts)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._lose()
            return False
        if sent < sum(map(len, parts)):
            self._keep(b"".join(parts)[sent:])
            self._loop.add_writer(self._socket, self._go_on)
        return True

    def close(self) -> None:
        """End the connection and forget what waits for it."""
        if self._retrying is not None:
            self._retrying.cancel()
        if self._socket is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
            self._socket.close()
            self._socket = None
        self._left.clear()
        self._left_bytes = 0

    def _connect(self) -> None:
        made = socket.socket(socket.AF_UNIX)
        made.setblocking(False)
        try:
            made.connect(str(self._path))
        except OSError:
            made.close()
            self._retrying = self._loop.call_later(self._wait_s, self._connect)
            self._wait_s = min(2 * self._wait_s, self._settings.slowest_reconnect_s)
            return
        self._socket, self._wait_s = made, self._settings.reconnect_s
        self._loop.add_reader(made, self._heard)
        early, self._early = self._early or (), None
        for message in early:
            self.post([message])

    def _heard(self) -> None:
        """Nothing is ever said on this connection but that it is over."""
        assert self._socket is not None
        try:
            over = not self._socket.recv(64)
        except BlockingIOError:
            return
        except OSError:
            over = True
        if over:
            self._lose()

    def _lose(self) -> None:
        self.close()
        self._retrying = self._loop.call_later(self._wait_s, self._connect)

    def _keep(self, rest: bytes) -> bool:
        if self._left and self._left_bytes + len(rest) > self._settings.queue_bytes:
            return False
        self._left.append(rest)
        self._left_bytes += len(rest)
        return True

    def _go_on(self) -> None:
        """The socket takes more."""
        assert self._socket is not None
        try:
            while self._left:
                rest = self._left[0]
                sent = self._socket.send(rest)
                self._left_bytes -= sent
                if sent < len(rest):
                    self._left[0] = rest[sent:]
                else:
                    self._left.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._lose()
            return
        self._loop.remove_writer(self._socket)


class _Incoming:
    """A connection that some peer has made."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        settings: StreamSettings,
        came: Callable[[list[memoryview]], None],
        owner: SocketCarrier,
    ) -> None:
        self._loop, self._socket = loop, connection
        self._came, self._owner = came, owner
        self._unpacker = Unpacker(settings.largest_frame_bytes)
        loop.add_reader(connection, self._read)

    def close(self) -> None:
        """End it."""
        self._loop.remove_reader(self._socket)
        self._socket.close()

    def _read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            for frames in self._unpacker.take(data):
                self._came(frames)
        except NotOurs:
            self._end(NOT_OURS)
            return
        if not data:
            self._end()

    def _end(self, reason: str = "") -> None:
        self.close()
        self._owner.ended(self, reason)


class NotOurs(ValueError):
    """Bytes that are no message of `packed`."""


class Unpacker:
    """Takes what comes on a connection apart into messages."""

    def __init__(self, largest_frame_bytes: int) -> None:
        self._largest, self._held = largest_frame_bytes, bytearray()

    def take(self, data: bytes) -> list[list[memoryview]]:
        """The frames of each message that is complete with these bytes, writable and aligned.

        Raises `NotOurs`; then nothing more can be made of the connection.
        """
        self._held += data
        messages = []
        while (sizes := self._sizes()) is not None:
            starts = [*itertools.accumulate(map(_padded, sizes), initial=_head_bytes(len(sizes)))]
            end = starts.pop()
            if len(self._held) < end:
                break
            message = memoryview(self._held[:end])
            del self._held[:end]
            pairs = zip(starts, sizes, strict=True)
            messages.append([message[start : start + size] for start, size in pairs])
        return messages

    def _sizes(self) -> tuple[int, ...] | None:
        """Of the frames of the next message, if its beginning is there."""
        held = self._held
        if len(held) < _COUNT.size:
            return None
        (count,) = _COUNT.unpack_from(held)
        if not 1 <= count <= MOST_FRAMES:
            raise NotOurs
        if len(held) < _head_bytes(count):
            return None
        sizes = struct.unpack_from(f"<{count}Q", held, _COUNT.size)
        if max(sizes) > self._largest:
            raise NotOurs
        return sizes


def packed(frames: Sequence[Frame]) -> list[Frame]:
    """What goes over a connection, in parts: a message's head, its frames and their padding."""
    sizes = [len(frame) for frame in frames]
    parts: list[Frame] = [struct.pack(f"<{1 + len(sizes)}Q", len(sizes), *sizes)]
    for frame, size in zip(frames, sizes, strict=True):
        parts.append(frame)
        if missing := -size % ALIGNMENT:
            parts.append(_PADDING[:missing])
    return parts


def path_of(address: str) -> Path:
    """The path in an address; raises `UserError` if there is none, or it is not private."""
    parts = urlsplit(address)
    if parts.scheme != SCHEME or not parts.path.startswith("/"):
        raise UserError(f"{address!r} is no address on this machine; write {SCHEME}:///path.")
    path = Path(parts.path)
    require_private(path.parent)
    return path


def _head_bytes(count: int) -> int:
    return _COUNT.size * (1 + count)


def _padded(size: int) -> int:
    return size + -size % ALIGNMENT
