"""Experts that live here, run for rows from anywhere; the engine keeps no books of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.specs import BoolArray
from trimmoe.models.base import DROPPED
from trimmoe.runtime.node.compute.states import entering
from trimmoe.runtime.node.compute.worker import Worker
from trimmoe.runtime.node.records.messages import Parcel, Partial
from trimmoe.runtime.node.records.output import BatchOutput
from trimmoe.runtime.node.records.slots import Slots
from trimmoe.runtime.node.records.sums import parted


def run_slots(worker: Worker, layer: int, items: Sequence[Slots]) -> BatchOutput:
    """Partial sums go to where their rows gather."""
    view = worker.view
    width = view.widths.attended
    hidden = entering(view, torch.cat([one.hidden[:, :width].to(view.dtype) for one in items]))
    experts = torch.cat([item.experts.cpu() for item in items]).long()
    gates = entering(view, torch.cat([item.gates.cpu() for item in items]), torch.float32)
    sums = view.experts(layer, hidden, experts.to(view.device), gates)
    worker.pace.experts(layer, experts.numpy())
    result, at = BatchOutput(), 0
    for item in items:
        its = slice(at, at + item.rows.total)
        part, several = sums[its], np.count_nonzero(experts[its].numpy() >= 0, axis=1) > 1
        if item.raw:
            none = np.full(tuple(experts[its].shape), DROPPED)
            begun = view.gathered_part(layer, hidden[its], none, gates[its]).clone()
            begun[:, -view.widths.part :] += part
            part = begun
        at += item.rows.total
        result.parcels += _returned(layer, item, part, several | item.raw, view.dtype)
    return result


def _returned(
    layer: int, item: Slots, part: Tensor, wide: BoolArray, dtype: torch.dtype
) -> list[Parcel]:
    """One message to each destination of the item's units; `wide` rows [n] as in `Partial`."""
    rows, pieces = item.rows, [where for _, where in item.rows.split()]
    parcels = []
    for destination in dict.fromkeys(item.destinations):
        units = [u for u, to in enumerate(item.destinations) if to == destination]
        kept = [row for u in units for row in range(pieces[u].start, pieces[u].stop)]
        whole = len(kept) == rows.total
        its = slice(None) if whole else np.array(kept)
        narrow, sums = parted(part[its], wide[its], dtype)
        message = Partial(
            layer=layer,
            rows=rows.chosen(
                units,
                [rows.counts[u] for u in units],
                [rows.offsets[row] for row in kept] if rows.offsets else [],
            ),
            decoding=item.decoding,
            raw=item.raw,
            wide=np.flatnonzero(wide[its]).tolist(),
            checks=item.checks,
        )
        parcels.append(Parcel(to=destination, message=message, tensors=(narrow, *sums)))
    return parcels
