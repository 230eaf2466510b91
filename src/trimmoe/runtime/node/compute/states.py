"""States between messages and the device that a server computes on.

What comes from other servers is on the processor, in the dtype that its sender computes in; what
this server keeps for itself stays on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from trimmoe.models.base import MoEView
from trimmoe.models.sums import sums_in
from trimmoe.runtime.node.records.messages import Parcel
from trimmoe.runtime.node.records.units import Unit


def entering(view: MoEView, states: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """States where the view computes, in its dtype or another; pinned and asynchronously where
    they have to be copied to an accelerator."""
    dtype = dtype or view.dtype
    if states.device == view.device and states.dtype == dtype:
        return states
    if states.dtype is torch.float64:
        # Rounded before it leaves: not every device has such.
        states = states.to(dtype)
    if view.device.type == "cuda" and states.is_cpu:
        states = states.pin_memory()
    return states.to(device=view.device, dtype=dtype, non_blocking=True)


def leaving(parcels: list[Parcel]) -> list[Parcel]:
    """The parcels with their tensors on the processor: all are copied at once, and waited for
    together."""
    away = {t.device for parcel in parcels for t in parcel.tensors if not t.is_cpu}
    if not away:
        return parcels
    copied = [replace(parcel, tensors=_copied(parcel.tensors)) for parcel in parcels]
    for device in away:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    return copied


def _copied(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """On the processor, or on their way there."""
    made = []
    for tensor in tensors:
        pinned = tensor.is_cuda
        there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        made.append(there.copy_(tensor, non_blocking=pinned))
    return tuple(made)


def states_of(view: MoEView, unit: Unit, layer: int) -> Tensor:
    """A unit's states [count, d] behind a layer, with all parts added, rounded once; of a unit that
    is to run its own slots there, those before its experts."""
    assert unit.hidden is not None
    widths = view.widths
    if unit.own is not None:
        return entering(view, unit.hidden)[:, : widths.attended]
    hidden = _added(view, unit) if unit.parts else entering(view, unit.hidden)
    moved = hidden.shape[1] == widths.moving != view.spec.hidden_size
    return view.whole(layer, hidden) if moved else hidden


def _added(view: MoEView, unit: Unit) -> Tensor:
    assert unit.hidden is not None
    wide = sums_in(view.dtype, view.device)
    total = entering(view, unit.hidden, wide)
    if total is unit.hidden:
        total = total.clone()
    for part in unit.parts:
        states = entering(view, part.states, wide)
        into = total if part.replaces else total[:, -view.widths.part :]
        if not part.offsets:
            into.copy_(states) if part.replaces else into.add_(states)
            continue
        at = torch.tensor(part.offsets, device=view.device)
        (into.index_copy_ if part.replaces else into.index_add_)(0, at, states)
    return total.to(view.dtype)
