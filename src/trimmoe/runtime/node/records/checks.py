"""What a message about rows must be like before anything is done with it.

Peers are authenticated, not trusted to be of the same mind: a wrong plan or version on one server
must not take the others down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from trimmoe.runtime.node.records.messages import (
    Dispatch,
    Message,
    Onward,
    Parcel,
    Partial,
    Prompt,
    Propagate,
    Reserve,
    Start,
    Weather,
    access_of,
)
from trimmoe.runtime.node.records.passengers import MalformedPassengers
from trimmoe.runtime.node.records.samplings import can_sample

_STATES = (torch.float32, torch.bfloat16, torch.float16)
"""What states may be: servers on other devices compute in other dtypes."""
_SUMS = (torch.float64, torch.float32)
"""What sums may be that others are to be added to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """What messages are checked against."""

    layer_count: int
    server_count: int
    hidden_size: int
    top_k: int
    loaded: tuple[frozenset[int], ...]
    """Experts that this server can run, by layer."""

    def is_server(self, *servers: int) -> bool:
        return all(0 <= server < self.server_count for server in servers)


def check(geometry: Geometry, message: Message, tensors: Sequence[Tensor]) -> None:
    """Raise `MalformedPassengers` unless the message can be acted upon."""
    match message:
        case Prompt():
            good = _is_prompt(tensors) and min(message.start, message.epoch) >= 0
        case Start():
            good = message.rows.well_formed() and len(message.tokens) == message.rows.total
            good = good and set(message.rows.counts) == {1}
        case Dispatch() | Partial() | Onward() | Propagate():
            good = _are_rows(geometry, message, tensors)
        case Reserve():
            good = len(message.route) == geometry.layer_count
            good = good and geometry.is_server(*message.route)
            good = good and can_sample(message.sampling, message.seen) and _is_prefix(message)
        case Weather():
            counts = {len(message.delay_s), len(message.bandwidth_bytes_per_s)}
            good = counts == {geometry.server_count} and geometry.is_server(*message.unreachable)
            good = good and all(0.0 <= weight <= 1.0 for weight in message.loss_weights)
            good = good and message.running >= 0
        case _:
            good = True
    if not good:
        raise MalformedPassengers(type(message).__name__)


def _is_prompt(tensors: Sequence[Tensor]) -> bool:
    if len(tensors) != 1:
        return False
    (ids,) = tensors
    return ids.ndim == 1 and ids.dtype == torch.int32 and ids.numel() > 0


def prompt(to: int, sequence: int, ids: Sequence[int], *, start: int = 0, epoch: int = 0) -> Parcel:
    """The tokens that a sequence begins with, from position `start` on, to the server of its first
    layer."""
    tokens = (torch.tensor(ids[start:], dtype=torch.int32),)
    return Parcel(to=to, message=Prompt(sequence, start, epoch), tensors=tokens)


def _is_prefix(asked: Reserve) -> bool:
    """Whether what a sequence is to begin with, if anything, is of the same server's users."""
    prefix = asked.prefix
    return prefix is None or (
        prefix.length > 0 and access_of(prefix.sequence) == access_of(asked.sequence)
    )


def _are_rows(
    geometry: Geometry,
    message: Dispatch | Partial | Onward | Propagate,
    tensors: Sequence[Tensor],
) -> bool:
    """Whether rows, states and what else comes with them agree."""
    if not message.rows.well_formed() or not 0 <= message.layer < geometry.layer_count:
        return False
    total = message.rows.total
    wide = message.wide if isinstance(message, Partial | Onward) else []
    if not _are_chosen(wide, total) or len(tensors) < 1 + bool(wide):
        return False
    shape = (total - len(wide), geometry.hidden_size)
    if tensors[0].shape != shape or tensors[0].dtype not in _STATES:
        return False
    if wide:
        shape, sums, tensors = (len(wide), geometry.hidden_size), tensors[1], tensors[1:]
        if sums.shape != shape or sums.dtype not in _SUMS:
            return False
    units, slots = len(message.rows.sequences), 0
    if isinstance(message, Dispatch):
        slots = total
        if len(message.destinations) != units or not geometry.is_server(*message.destinations):
            return False
    elif isinstance(message, Onward):
        slots = len(message.raw)
        if not _is_onward(geometry, message):
            return False
    elif isinstance(message, Propagate) and set(message.rows.counts) != {1}:
        return False
    return _are_slots(geometry, message.layer, slots, tensors[1:])


def _is_onward(geometry: Geometry, message: Onward) -> bool:
    units = len(message.rows.sequences)
    raw = message.raw
    return (
        len(message.awaited) == len(message.probes) == units
        and all(geometry.is_server(*servers) for servers in message.awaited)
        and _are_chosen(raw, message.rows.total)
        and not set(raw).intersection(message.wide)
        and not message.rows.offsets
        and len(message.spent) in (0, message.rows.total)
        and all(0.0 <= loss < math.inf for loss in message.spent)
        and (not message.decoding or set(message.rows.counts) == {1})
        and (not message.entering or message.layer + 1 < geometry.layer_count)
    )


def _are_chosen(rows: Sequence[int], total: int) -> bool:
    """Whether these are some of so many rows, ascending."""
    return list(rows) == sorted(set(rows)) and all(0 <= row < total for row in rows)


def _are_slots(geometry: Geometry, layer: int, count: int, tensors: Sequence[Tensor]) -> bool:
    """Whether these are experts that run here, and gates, of so many rows."""
    if not count:
        return not tensors
    if len(tensors) != 2 or any(each.shape != (count, geometry.top_k) for each in tensors):
        return False
    experts, gates = tensors
    if experts.dtype != torch.int32 or gates.dtype != torch.float32:
        return False
    asked = set(experts.reshape(-1).tolist())
    asked.discard(-1)
    return geometry.loaded[layer] >= asked
