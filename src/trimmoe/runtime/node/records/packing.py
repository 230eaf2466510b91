"""What travels with a token, as bytes: its `Wave` row, its ledger, its receipt.

The rows of a wave travel as they are in memory, so that nobody spends time on packing them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import msgspec
import numpy as np

from trimmoe.core.events import Receipt
from trimmoe.core.ledger import Kind, Ledger
from trimmoe.core.wave import FLOATS, INTS, NOT_PROBED, Wave, width_of
from trimmoe.runtime.node.records.messages import Onward, Parcel, Start, access_of
from trimmoe.runtime.node.records.tokens import NO_KIND, ChargeSpec, LedgerSpec, ReceiptSpec

MOST_MESSAGES = 1 << 16
"""Between two servers for one token; as many, less one, as a packed ledger has room for."""
MOST_SUM = 1e6
"""Of seconds and of losses."""
_WORD, _COUNT = np.dtype("<i8"), np.dtype("<u2")


class MalformedMessage(ValueError):
    """Bytes that are no rows of a wave."""


def pack_wave(wave: Wave) -> bytes:
    """The words of all rows of a wave, little-endian. Its route means nothing elsewhere: every
    server numbers routes for itself."""
    return wave.words.astype(_WORD, copy=False).tobytes()


def unpack_wave(
    packed: bytes,
    *,
    layer: int,
    sequences: Sequence[int],
    layer_count: int,
    server_count: int,
) -> Wave:
    """The rows at `layer`, on route 0 until somebody knows better; `MalformedMessage`."""
    count, width = len(sequences), width_of(layer_count, server_count)
    if len(packed) != count * width * _WORD.itemsize:
        raise MalformedMessage(f"{len(packed)} bytes for {count} rows")
    words = np.frombuffer(packed, _WORD).reshape(count, width).astype(np.int64)
    wave = Wave(
        layer=layer,
        sequences=tuple(sequences),
        alive=np.arange(count),
        layer_count=layer_count,
        server_count=server_count,
        words=words,
    )
    wave.route[:] = 0
    access = [access_of(sequence) for sequence in sequences]
    if not (_may_be(wave) and wave.access.tolist() == access):
        raise MalformedMessage("a layer of no kind, no such server, or other impossible values")
    return wave


def _may_be(wave: Wave) -> bool:
    """Whether all that arrays are indexed with is of them, and all that is added up is a number."""
    least, span, low, high = _bounds(wave.layer_count, wave.server_count)
    # Whatever is less than its least is more than any span without its sign.
    counts = (wave.words[:, len(FLOATS) :] - least).view(np.uint64)
    reals = wave.words[:, : len(FLOATS)].view(np.float64)
    return bool((counts < span).all() and ((low <= reals) & (reals <= high)).all())


@lru_cache(maxsize=8)
def _bounds(layers: int, servers: int) -> tuple[np.ndarray, ...]:
    """Of the whole numbers of a row the least and how many there are from it on; of the others the
    least and the most."""
    whole = {
        "access": (0, servers),
        "route": (0, 1),
        "server": (0, servers),
        "exit_at": (1, layers),
        "probed": (NOT_PROBED, layers + 1),
        "slots_run": (0, MOST_MESSAGES),
        "slots_dropped": (0, MOST_MESSAGES),
    }
    ranges = [whole[name] for name in INTS]
    ranges += [(0, len(Kind))] * layers + [(0, MOST_MESSAGES)] * servers**2
    least, span = (np.array(part) for part in zip(*ranges, strict=True))
    real = {"draws": (0.0, 1.0), "loss_weight": (0.0, 1.0), "answered_s": (0.0, np.inf)}
    # What an exit was charged may be taken back, so that sums may be below zero.
    real |= dict.fromkeys(("loss", "delay_s", "exit_loss"), (-MOST_SUM, MOST_SUM))
    low, high = zip(*(real.get(name, (-np.inf, np.inf)) for name in FLOATS), strict=True)
    return least.astype(np.int64), span.astype(np.uint64), np.array(low), np.array(high)


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
        messages=ledger.messages.astype(_COUNT).tobytes(),
        delay_s=ledger.delay_s,
        loss=ledger.loss,
        budget=ledger.budget,
        audits=ledger.audits,
        corrects=bool(known.any()) and not ledger.tokens,
    )


def unpack_ledger(
    packed: LedgerSpec, *, layer_count: int, server_count: int, hidden_bytes: int
) -> Ledger:
    """The ledger; raises `MalformedMessage`."""
    which = np.frombuffer(packed.kinds, dtype=np.uint8)
    told = which != NO_KIND
    if which.size not in (0, layer_count) or (which[told] > max(Kind)).any():
        raise MalformedMessage("kinds")
    if not (told.all() or packed.corrects):
        raise MalformedMessage("kinds")
    if len(packed.messages) != server_count**2 * _COUNT.itemsize:
        raise MalformedMessage("messages")
    messages = np.frombuffer(packed.messages, dtype=_COUNT)
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
    """A prompt's stand-ins as a ledger of no generated token; raises `MalformedMessage`.

    Each token that any ran for was credited `budget`, and nothing is left of it.
    """
    credited = charge.tokens * budget
    # A sum of as many floats may miss its bound by their rounding.
    if not 0.0 <= charge.loss <= credited * (1.0 + 1e-9):
        raise MalformedMessage("charge")
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
