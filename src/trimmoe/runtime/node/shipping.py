"""A layer's slots dealt out: what runs here, and which frames carry the rest where.

The frames are those of the cost model (`cost.model.layer_messages`): a vector to each distinct
server of a slot, one from each to where the layer gathers, and the residual. Where the destination
runs slots itself and nothing ran here, dispatch and residual are the same vector: it goes raw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.specs import BoolArray, IntArray
from trimmoe.core.wave import Wave
from trimmoe.models.base import DROPPED
from trimmoe.runtime.node.messages import Dispatch, Onward, Parcel
from trimmoe.runtime.node.rows import Rows
from trimmoe.runtime.node.units import Unit, epochs_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """Where the slots of n rows run."""

    slot_expert: IntArray
    """[n, k], -1 = dropped."""
    slot_server: IntArray
    """[n, k]."""
    destination: IntArray
    """[n]."""
    here: int
    used: BoolArray
    """Servers that run any slot of a row, [n, M]."""

    @staticmethod
    def of(
        slot_expert: IntArray,
        slot_server: IntArray,
        destination: IntArray,
        *,
        here: int,
        server_count: int,
    ) -> Split:
        """See the fields."""
        used = np.zeros((destination.size, server_count), dtype=bool)
        runs = slot_expert >= 0
        used[np.broadcast_to(np.arange(destination.size)[:, None], runs.shape)[runs],
             slot_server[runs]] = True  # fmt: skip
        return Split(
            slot_expert=slot_expert,
            slot_server=slot_server,
            destination=destination,
            here=here,
            used=used,
        )

    def at(self, server: int) -> IntArray:
        """Experts that a server runs, [n, k]; -1 for all other slots."""
        return np.where(self.slot_server == server, self.slot_expert, DROPPED)

    @property
    def leaves(self) -> BoolArray:
        """Rows that another server has to do with, [n]."""
        others = self.used.copy()
        others[:, self.here] = False
        return others.any(1) | (self.destination != self.here)

    @property
    def raw(self) -> BoolArray:
        """Rows whose dispatch and residual are the same vector, [n]."""
        there = self.used[np.arange(self.destination.size), self.destination]
        return there & ~self.used[:, self.here] & (self.destination != self.here)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cargo:
    """n rows of some units, after a layer's attention."""

    layer: int
    units: Sequence[Unit]
    unit_of: IntArray
    """Index of each row's unit, ascending, [n]."""
    offset: IntArray
    """Offset of each row in its unit, [n]."""
    attended: Tensor
    """Before the experts, [n, d]."""
    output: Tensor
    """With the shared expert and the slots that ran here, [n, d]."""
    gates: Tensor
    """float32 [n, k]."""

    def rows(self, which: IntArray) -> Rows:
        """The message's description of these rows."""
        index, counts = np.unique(self.unit_of[which], return_counts=True)
        units = [self.units[i] for i in index.tolist()]
        complete = all(u.count == c for u, c in zip(units, counts.tolist(), strict=True))
        return Rows(
            [unit.seat.sequence for unit in units],
            [unit.start for unit in units],
            counts.tolist(),
            [] if complete else self.offset[which].tolist(),
            epochs_of(units),
        )


def dispatched(cargo: Cargo, split: Split, leaving: IntArray) -> list[Parcel]:
    """The frames to servers of slots of the rows `leaving`; they need no `output`."""
    mask = _mask(split, leaving)
    raw = split.raw
    parcels = []
    for server in np.flatnonzero(split.used[leaving].any(0)).tolist():
        sent = mask & split.used[:, server] & ~(raw & (split.destination == server))
        if server != split.here and sent.any():
            parcels.append(_dispatch(cargo, split, server, np.flatnonzero(sent)))
    return parcels


def onward(
    cargo: Cargo, split: Split, leaving: IntArray, wave: Wave | None, *, entering: bool = False
) -> list[Parcel]:
    """The frames to where the rows `leaving` gather, whole units; `wave` has a row for each, None
    in prompts. `entering` as in `Onward`."""
    mask = _mask(split, leaving)
    raw = split.raw
    parcels = []
    for destination in np.unique(split.destination[leaving]).tolist():
        which = np.flatnonzero(mask & (split.destination == destination))
        among = None if wave is None else wave.take(np.searchsorted(leaving, which))
        parcels.append(_onward(cargo, split, destination, which, raw[which], among, entering))
    return parcels


def _mask(split: Split, rows: IntArray) -> BoolArray:
    mask = np.zeros(split.destination.size, dtype=bool)
    mask[rows] = True
    return mask


def _dispatch(cargo: Cargo, split: Split, server: int, which: IntArray) -> Parcel:
    rows = torch.from_numpy(which)
    first = np.unique(cargo.unit_of[which], return_index=True)[1]
    for unit in {int(i) for i in cargo.unit_of[which]}:
        one = cargo.units[unit]
        one.seat.dispatched[server] = one.start
    return Parcel(
        to=server,
        message=Dispatch(
            layer=cargo.layer,
            rows=cargo.rows(which),
            destinations=split.destination[which][first].tolist(),
            decoding=cargo.units[0].decoding,
        ),
        tensors=(
            cargo.attended[rows],
            torch.from_numpy(split.at(server)[which]).int(),
            cargo.gates[rows],
        ),
    )


def _onward(
    cargo: Cargo,
    split: Split,
    destination: int,
    which: IntArray,
    raw: BoolArray,
    wave: Wave | None,
    entering: bool,
) -> Parcel:
    rows, raw_rows = torch.from_numpy(which), np.flatnonzero(raw)
    hidden = cargo.output[rows]
    slots: tuple[Tensor, ...] = ()
    if raw_rows.size:
        at = torch.from_numpy(which[raw_rows])
        hidden[torch.from_numpy(raw_rows)] = cargo.attended[at]
        experts = split.at(destination)[which[raw_rows]]
        slots = (torch.from_numpy(experts).int(), cargo.gates[at])
    awaited = split.used[which].copy()
    awaited[:, split.here] = False
    awaited[raw, destination] = False
    indices = np.unique(cargo.unit_of[which])
    units = [cargo.units[i] for i in indices.tolist()]
    by_unit = [awaited[cargo.unit_of[which] == i].any(0) for i in indices]
    return Parcel(
        to=destination,
        message=Onward(
            layer=cargo.layer,
            rows=cargo.rows(which),
            awaited=[np.flatnonzero(servers).tolist() for servers in by_unit],
            raw=raw_rows.tolist(),
            probes=[unit.probe for unit in units],
            decoding=wave is not None,
            last=units[0].last,
            spent=[] if units[0].spent is None else units[0].spent.tolist(),
            entering=entering,
        ),
        tensors=(hidden, *slots),
        wave=wave,
    )
