"""A layer's slots dealt out: what runs here, and which frames carry the rest where.

The frames are those of the cost model (`cost.model.add_layer_messages`): a vector to each distinct
server of a slot, one from each to where the layer gathers, and the residual. Where the destination
runs slots itself and nothing ran here, dispatch and residual are the same vector: it goes raw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trimmoe.core.specs import BoolArray, IntArray
from trimmoe.core.wave import Wave
from trimmoe.models.base import DROPPED, MoEView
from trimmoe.models.sums import sums_in
from trimmoe.runtime.node.records.messages import NOBODY, Dispatch, Onward, Parcel
from trimmoe.runtime.node.records.rows import Rows
from trimmoe.runtime.node.records.sums import parted
from trimmoe.runtime.node.records.units import Unit, rows_of


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
    leaves: BoolArray
    """Rows that another server has to do with, [n]."""
    raw: BoolArray
    """Rows whose dispatch and residual are the same vector, [n]."""
    wide: BoolArray
    """Rows for which slots ran here that those of other servers are to be added to, [n]."""

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
        rows = np.arange(destination.size)
        # Dropped slots mark a column of their own.
        marked = np.zeros((rows.size, server_count + 1), dtype=bool)
        marked[rows[:, None], np.where(slot_expert >= 0, slot_server, server_count)] = True
        used, away = marked[:, :server_count], destination != here
        works, shared = used[:, here], used.sum(1) > used[:, here]
        return Split(
            slot_expert=slot_expert,
            slot_server=slot_server,
            destination=destination,
            here=here,
            used=used,
            leaves=away | shared,
            raw=used[rows, destination] & ~works & away,
            wide=works & shared,
        )

    def at(self, server: int) -> IntArray:
        """Experts that a server runs, [n, k]; -1 for all other slots."""
        return np.where(self.slot_server == server, self.slot_expert, DROPPED)


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
    """With the shared expert and the slots that ran here, [n, moving], of rows that stay [n, d] in
    its first columns, not rounded yet (`models.sums`); of raw rows nothing."""
    gates: Tensor
    """float32 [n, k]."""
    checks: dict[int, list[tuple[int, int]]] = field(default_factory=dict)
    """By row: servers whose results are compared, each with who computes them a second time."""

    @staticmethod
    def of_tokens(
        view: MoEView, layer: int, units: Sequence[Unit], attended: Tensor, gates: Tensor
    ) -> Cargo:
        """A row of each unit."""
        count = len(units)
        return Cargo(
            layer=layer,
            units=units,
            unit_of=np.arange(count),
            offset=np.zeros(count, dtype=np.int64),
            attended=attended,
            output=room(view, attended),
            gates=gates,
        )

    def of(self, which: IntArray) -> tuple[list[Unit], IntArray]:
        """The units that these rows belong to, and how many of the rows belong to each."""
        if len(self.units) == self.unit_of.size:
            return [self.units[i] for i in which.tolist()], np.ones_like(which)
        index, counts = np.unique(self.unit_of[which], return_counts=True)
        return [self.units[i] for i in index.tolist()], counts

    def rows(
        self, which: IntArray, units: Sequence[Unit], counts: IntArray, *, moving: bool = False
    ) -> Rows:
        """The message's description of these rows, of which `of` says the other two; with their
        tokens if the units are `moving` on."""
        whole = all(u.count == c for u, c in zip(units, counts.tolist(), strict=True))
        offsets = [] if whole else self.offset[which].tolist()
        return rows_of(units, counts.tolist(), offsets, moving=moving)


def room(view: MoEView, attended: Tensor) -> Tensor:
    """For what becomes of states [n, attended] behind a layer: [n, moving]."""
    wide = sums_in(view.dtype, view.device)
    return attended.new_empty(attended.shape[0], view.widths.moving, dtype=wide)


def dispatched(cargo: Cargo, split: Split, leaving: IntArray) -> list[Parcel]:
    """The frames to servers of slots of the rows `leaving`; they need no `output`."""
    used = split.used[leaving]
    used[:, split.here] = False
    raw = split.raw[leaving]
    used[raw, split.destination[leaving][raw]] = False
    servers = np.flatnonzero(used.any(0)).tolist()
    parcels = [_dispatch(cargo, split, to, leaving[used[:, to]]) for to in servers]
    if not cargo.checks:
        return parcels
    seconds: dict[tuple[int, int], list[int]] = {}
    for row in leaving.tolist():
        for check in cargo.checks.get(row, ()):
            seconds.setdefault(check, []).append(row)
    return parcels + [
        _dispatch(cargo, split, to, np.array(rows), checks=server)
        for (server, to), rows in seconds.items()
    ]


def onward(
    cargo: Cargo, split: Split, leaving: IntArray, wave: Wave | None, *, entering: bool = False
) -> list[Parcel]:
    """The frames to where the rows `leaving` gather, whole units; `wave` has a row for each, None
    in prompts. `entering` as in `Onward`."""
    destinations = split.destination[leaving]
    first = int(destinations[0])
    if (destinations == first).all():
        return [_onward(cargo, split, first, leaving, wave, entering)]
    parcels = []
    for destination in np.unique(destinations).tolist():
        among = np.flatnonzero(destinations == destination)
        part = None if wave is None else wave.take(among)
        parcels.append(_onward(cargo, split, destination, leaving[among], part, entering))
    return parcels


def whole(layer: int, units: Sequence[Unit], hidden: Tensor, wave: Wave, to: int) -> Parcel:
    """The frame with generated tokens of which nothing is left to do in a layer: their states
    behind it, [n, d], and `wave` about to enter the next one, where the server `to` has them."""
    return Parcel(
        to=to,
        message=Onward(
            layer=layer,
            rows=rows_of(units),
            awaited=[[]] * len(units),
            raw=[],
            probes=[unit.probe for unit in units],
            decoding=True,
            last=False,
            entering=True,
        ),
        tensors=(hidden,),
        wave=wave,
    )


def _dispatch(
    cargo: Cargo, split: Split, server: int, which: IntArray, *, checks: int = NOBODY
) -> Parcel:
    """`checks`: the server whose slots these are, if this one computes them a second time."""
    rows, (units, counts) = torch.from_numpy(which), cargo.of(which)
    for one in units:
        one.seat.dispatched[server] = one.start
    first = np.cumsum([0, *counts[:-1]])
    return Parcel(
        to=server,
        message=Dispatch(
            layer=cargo.layer,
            rows=cargo.rows(which, units, counts),
            destinations=split.destination[which][first].tolist(),
            decoding=cargo.units[0].decoding,
            checks=checks,
        ),
        tensors=(
            cargo.attended[rows],
            torch.from_numpy(split.at(server if checks == NOBODY else checks)[which]).int(),
            cargo.gates[rows],
        ),
    )


def _onward(
    cargo: Cargo,
    split: Split,
    destination: int,
    which: IntArray,
    wave: Wave | None,
    entering: bool,
) -> Parcel:
    output, raw, wide = cargo.output[torch.from_numpy(which)], split.raw[which], split.wide[which]
    slots: tuple[Tensor, ...] = ()
    if raw.any():
        at = torch.from_numpy(which[raw])
        missing = output.shape[1] - cargo.attended.shape[1]
        output[torch.from_numpy(raw)] = F.pad(cargo.attended[at].to(output.dtype), (0, missing))
        experts = split.at(destination)[which[raw]].astype(np.int32)
        slots = (torch.from_numpy(experts), cargo.gates[at])
    hidden, sums = parted(output, wide, cargo.attended.dtype)
    units, counts = cargo.of(which)
    awaited = split.used[which]
    awaited[:, split.here] = False
    awaited[raw, destination] = False
    by_unit = np.logical_or.reduceat(awaited, np.cumsum([0, *counts[:-1]]))
    return Parcel(
        to=destination,
        message=Onward(
            layer=cargo.layer,
            rows=cargo.rows(which, units, counts, moving=True),
            awaited=[np.flatnonzero(servers).tolist() for servers in by_unit],
            raw=np.flatnonzero(raw).tolist(),
            probes=[unit.probe for unit in units],
            decoding=wave is not None,
            last=units[0].last,
            spent=[] if units[0].spent is None else units[0].spent.tolist(),
            entering=entering,
            wide=np.flatnonzero(wide).tolist(),
            checked=_checked(cargo, which, counts),
        ),
        tensors=(hidden, *sums, *slots),
        wave=wave,
    )


def _checked(cargo: Cargo, which: IntArray, counts: IntArray) -> list[list[tuple[int, int]]]:
    """As in `Onward`, of rows of units of which there are so many each."""
    if not cargo.checks or not any(row in cargo.checks for row in which.tolist()):
        return []
    by_unit = np.split(which, np.cumsum(counts)[:-1])
    return [
        sorted({check for row in rows.tolist() for check in cargo.checks.get(row, ())})
        for rows in by_unit
    ]
