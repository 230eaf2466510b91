"""What transports tell each other: the envelope of every message, and heartbeats.

On the wire: an envelope, then either a beat (and the padding of a probe) or the frames of `codec`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from trimmoe.runtime.wire.base import Frame
from trimmoe.runtime.wire.codec import MalformedFrame, checked_decode

WIRE_VERSION = 1
ENVELOPE_BYTES = 512
"""Longer first frames are refused unread."""


class Envelope(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first frame of everything on the wire."""

    version: int
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


class Beat(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
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
_beats = msgspec.msgpack.Decoder(Beat)


def pack(part: Envelope | Beat) -> bytes:
    """One frame."""
    return _encoder.encode(part)


def open_envelope(frames: Sequence[Frame], receiver: str, origin: str | None) -> Envelope:
    """The envelope of what came for `receiver` from `origin`, None if nothing authenticated it.

    Raises `MalformedFrame` with one of a few reasons.
    """
    if len(frames) < 2 or len(frames[0]) > ENVELOPE_BYTES:
        raise MalformedFrame("no envelope")
    try:
        envelope: Envelope = checked_decode(_envelopes, frames[0])
    except MalformedFrame:
        raise MalformedFrame("no envelope") from None
    if envelope.version != WIRE_VERSION:
        raise MalformedFrame("another version of the protocol")
    if envelope.session <= 0:
        raise MalformedFrame("no envelope")
    if envelope.receiver != receiver:
        raise MalformedFrame("meant for another server")
    if origin is not None and origin != envelope.sender:
        raise MalformedFrame("sender is not who it claims to be")
    return envelope


def open_beat(frame: Frame) -> Beat:
    """The beat in a frame; raises `MalformedFrame`."""
    beat: Beat = checked_decode(_beats, frame)
    return beat
