"""What travels with a token, as bytes: its `Wave` row, its ledger, its receipt.

Every row is as long as every other, so packing many rows is one copy per group of columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import msgspec
import numpy as np

from trimmoe.core.events import Receipt
from trimmoe.core.ledger import Kind, Ledger
from trimmoe.core.specs import IntArray
from trimmoe.core.wave import FLOATS, SCALARS, Wave, width_of
from trimmoe.runtime.node.records.messages import (
    NO_KIND,
    ChargeSpec,
    LedgerSpec,
    Onward,
    Parcel,
    ReceiptSpec,
    Start,
)


class MalformedPassengers(ValueError):
    """Bytes that are no rows of a wave."""


def pack_wave(wave: Wave) -> bytes:
    """All rows of a wave, column group by column group, little-endian everywhere. Its route means
    nothing elsewhere: every server numbers routes for itself."""
    groups = _groups(wave.layer_count, wave.server_count)
    return b"".join([wave.words[:, part].astype(kind).tobytes() for part, kind in groups])


def unpack_wave(
    packed: bytes,
    *,
    layer: int,
    sequences: Sequence[int],
    layer_count: int,
    server_count: int,
) -> Wave:
    """The rows at `layer`, on route 0 until somebody knows better; `MalformedPassengers`."""
    count, at = len(sequences), 0
    words = np.empty((count, width_of(layer_count, server_count)), dtype=np.int64)
    groups = _groups(layer_count, server_count)
    row_bytes = sum((part.stop - part.start) * kind.itemsize for part, kind in groups)
    if len(packed) != count * row_bytes:
        raise MalformedPassengers(f"{len(packed)} bytes for {count} rows")
    for part, kind in groups:
        group = np.frombuffer(packed, kind, count * (part.stop - part.start), at)
        words[:, part] = group.reshape(count, -1)
        at += group.nbytes
    wave = Wave(
        layer=layer,
        sequences=tuple(sequences),
        alive=np.arange(count),
        layer_count=layer_count,
        server_count=server_count,
        words=words,
    )
    wave.route[:] = 0
    if (wave.kinds > max(Kind)).any() or not _all_below(wave.server, server_count):
        raise MalformedPassengers("a layer of no kind, or no such server")
    return wave


@cache
def _groups(layer_count: int, server_count: int) -> tuple[tuple[slice, np.dtype], ...]:
    """Which words of a row travel together, and as what."""
    kinds_end = SCALARS + layer_count
    ends = (0, len(FLOATS), SCALARS, kinds_end, width_of(layer_count, server_count))
    kinds = [np.dtype(kind) for kind in ("<i8", "<i4", "u1", "<u2")]
    return tuple(zip(map(slice, ends[:-1], ends[1:]), kinds, strict=True))


def _all_below(values: IntArray, bound: int) -> bool:
    return bool(((values >= 0) & (values < bound)).all())


def sealed(parcel: Parcel) -> msgspec.Struct:
    """The parcel's message with its wave packed."""
    if parcel.wave is None:
        return parcel.message
    assert isinstance(parcel.message, (Start, Onward))
    return msgspec.structs.replace(parcel.message, wave=pack_wave(parcel.wave))


def pack_ledger(ledger: Ledger) -> LedgerSpec:
    """A one-token ledger, or one of what followed a token."""
    assert ledger.tokens in (0, 1)
    known, kinds = ledger.kinds.any(1), ledger.kinds.argmax(1)
    return LedgerSpec(
        kinds=np.where(known, kinds, NO_KIND).astype(np.uint8).tobytes() if known.any() else b"",
        slots_run=ledger.slots_run,
        slots_dropped=ledger.slots_dropped,
        messages=ledger.messages.astype("<u2").tobytes(),
        delay_s=ledger.delay_s,
        loss=ledger.loss,
        budget=ledger.budget,
        audits=ledger.audits,
        corrects=bool(known.any()) and not ledger.tokens,
    )


def unpack_ledger(
    packed: LedgerSpec, *, layer_count: int, server_count: int, hidden_bytes: int
) -> Ledger:
    """The ledger; raises `MalformedPassengers`."""
    which = np.frombuffer(packed.kinds, dtype=np.uint8)
    told = which != NO_KIND
    if which.size not in (0, layer_count) or (which[told] > max(Kind)).any():
        raise MalformedPassengers("kinds")
    if not (told.all() or packed.corrects):
        raise MalformedPassengers("kinds")
    messages = np.frombuffer(packed.messages, dtype="<u2")
    if messages.size != server_count**2:
        raise MalformedPassengers("messages")
    kinds = np.zeros((layer_count, len(Kind)), dtype=np.int64)
    kinds[np.flatnonzero(told), which[told]] = 1
    if packed.corrects:
        kinds[np.flatnonzero(told), Kind.EXITED] -= 1
    return Ledger(
        tokens=int(which.size > 0 and not packed.corrects),
        kinds=kinds,
        slots_run=packed.slots_run,
        slots_dropped=packed.slots_dropped,
        messages=messages.reshape(server_count, server_count).astype(np.int64),
        hidden_bytes=hidden_bytes,
        delay_s=packed.delay_s,
        loss=packed.loss,
        budget=packed.budget,
        audits=packed.audits,
    )


def unpack_charge(
    charge: ChargeSpec, budget: float, *, layer_count: int, server_count: int, hidden_bytes: int
) -> Ledger:
    """A prompt's stand-ins as a ledger of no generated token; raises `MalformedPassengers`.

    Each token that any ran for was credited `budget`, and nothing is left of it.
    """
    credited = charge.tokens * budget
    # A sum of as many floats may miss its bound by their rounding.
    if not 0.0 <= charge.loss <= credited * (1.0 + 1e-9):
        raise MalformedPassengers("charge")
    empty = Ledger.empty(layer_count, server_count, hidden_bytes)
    return replace(empty, loss=min(charge.loss, credited), budget=credited)


def pack_receipt(receipt: Receipt) -> ReceiptSpec:
    """A receipt; its sequence is named by the token it belongs to."""
    return ReceiptSpec(
        budget=receipt.budget,
        loss=receipt.loss,
        delay_s=receipt.delay_s,
        exit_confidence=receipt.exit_confidence,
    )


def unpack_receipt(packed: ReceiptSpec, sequence: int) -> Receipt:
    """The receipt of a token of `sequence`."""
    return Receipt(
        sequence=sequence,
        budget=packed.budget,
        loss=packed.loss,
        delay_s=packed.delay_s,
        exit_confidence=packed.exit_confidence,
    )
