"""What transports tell each other: the envelope of every message, and heartbeats.

On the wire: an envelope, then either a beat (and the padding of a probe) or the frames of `codec`.

The protocol has a major and a minor version. Servers of one major version understand one another: a
minor one may append fields with defaults to what is there, which older servers pass over, and add
messages, which nobody sends to a server that does not know them (`Transport.version_of`). Whatever
else changes, the first two elements of an envelope stay what they are, so that every version can
tell which one it meets.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trimmoe.runtime.wire.base import Frame
from trimmoe.runtime.wire.codec import MalformedFrame, checked_decode
from trimmoe.runtime.wire.version import Version

WIRE_VERSION = Version(2, 6)
"""What this software speaks."""
# 2.1 brought `trimmed` of `Reserve`, 2.2 what results are verified by (`checks`, `checked`) and
# `disputed` of `Lost`, 2.3 `wants` of `Rows` and `Prompt` and `follows` of `Token`; since 2.4 what
# `wants` says is a chance, and no longer a number; 2.5 brought `prompts` and `tokens_per_s` of
# `LoadReport`, 2.6 `cuts` of `Rows`.
VERIFIES_SINCE = Version(2, 2)
"""Servers that speak an older one pass over what a second computation is for, and would take it for
a first one."""
ENVELOPE_BYTES = 512
"""Longer first frames are refused unread."""


class OtherVersion(MalformedFrame):
    """An envelope of another major version of the protocol."""

    def __init__(self, sender: str, major: int) -> None:
        super().__init__("another version of the protocol")
        self.sender, self.major = sender, major

    def sentence(self, receiver: str) -> str:
        """What the operator should know."""
        return (
            f"{self.sender} speaks version {self.major} of the protocol between servers and "
            f"{receiver} version {WIRE_VERSION.major}: they cannot serve together; install releases"
            " of TrimMoE that speak the same one on both."
        )


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of everything on the wire."""

    version: int
    """The major one."""
    sender: str
    receiver: str
    session: int
    """The sender's session towards the receiver."""
    sequence: int
    """Number of this message in the session, from 1; of the last one sent if this is a beat."""
    heard: int
    """The receiver's session that the sender hears; 0 if none."""
    received: int
    """Messages of that session that the sender has consumed."""
    sent_s: float
    """On the sender's clock."""
    is_beat: bool
    minor: int = 0


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """The second frame of a heartbeat; a third frame, if any, is padding of a probe."""

    echo_s: float
    """`sent_s` of the receiver's last beat; 0 if none."""
    held_s: float
    """How long ago, on the sender's clock, that beat came."""
    rate_bytes_per_s: float
    """Bandwidth of the link from the receiver as the sender measures it; 0 if unmeasured."""
    train_count: int
    """Measurements behind it so far."""


_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(Envelope)
_beginnings = msgspec.msgpack.Decoder(list[msgspec.Raw])
_majors, _names = msgspec.msgpack.Decoder(int), msgspec.msgpack.Decoder(str)
_beats = msgspec.msgpack.Decoder(Beat)


def pack(part: Envelope | Beat) -> bytes:
    """One frame."""
    return _encoder.encode(part)


def open_envelope(frames: Sequence[Frame], receiver: str, origin: str | None) -> Envelope:
    """The envelope of what came for `receiver` from `origin`, None if nothing authenticated it.

    Raises `MalformedFrame` with one of a few reasons, `OtherVersion` among them.
    """
    if len(frames) < 2 or len(frames[0]) > ENVELOPE_BYTES:
        raise MalformedFrame("no envelope")
    try:
        envelope: Envelope = checked_decode(_envelopes, frames[0])
    except MalformedFrame:
        _require_major(frames[0])
        raise MalformedFrame("no envelope") from None
    if envelope.version != WIRE_VERSION.major:
        _require_major(frames[0])
    if envelope.session <= 0:
        raise MalformedFrame("no envelope")
    if envelope.receiver != receiver:
        raise MalformedFrame("meant for another server")
    if origin is not None and origin != envelope.sender:
        raise MalformedFrame("sender is not who it claims to be")
    return envelope


def _require_major(frame: Frame) -> None:
    """Raise `OtherVersion` for an envelope of another one, however it goes on."""
    try:
        major, sender = checked_decode(_beginnings, frame)[:2]
        spoken, name = checked_decode(_majors, major), checked_decode(_names, sender)
    except ValueError:
        raise MalformedFrame("no envelope") from None
    if spoken != WIRE_VERSION.major:
        raise OtherVersion(name, spoken)


def open_beat(frame: Frame) -> Beat:
    """The beat in a frame; raises `MalformedFrame`."""
    beat: Beat = checked_decode(_beats, frame)
    return beat
