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

from trimmoe.models.base import MoEView
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.models.passed import Widths
from trimmoe.runtime.node.records.messages import (
    NO_TOKEN,
    NOBODY,
    Dispatch,
    Followed,
    Granted,
    LoadReport,
    Message,
    Onward,
    Parcel,
    Partial,
    Prompt,
    Propagate,
    Reserve,
    Running,
    SeenSpec,
    Start,
    Tokens,
    Vitals,
    Withdraw,
    access_of,
)
from trimmoe.runtime.node.records.packing import MalformedMessage
from trimmoe.runtime.node.records.plausible import (
    MOST_WEIGHTS,
    all_below,
    are_tokens,
    are_told_after,
    can_draw,
    comes_from,
    is_count,
    is_rate,
    is_share,
)
from trimmoe.runtime.node.records.rows import Rows
from trimmoe.runtime.node.records.samplings import can_sample
from trimmoe.runtime.seen import UNKNOWN

_STATES = (torch.float32, torch.bfloat16, torch.float16)
"""What states may be: servers on other devices compute in other dtypes."""
_SUMS = (torch.float64, torch.float32)
"""What sums may be that others are to be added to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Geometry:
    """What messages are checked against."""

    layer_count: int
    server: int
    """This one."""
    server_count: int
    hidden_size: int
    top_k: int
    vocab_size: int
    context_length: int
    """Positions that a sequence may have. It is withdrawn less often: a token is shown in between.
    """
    widths: Widths
    loaded: tuple[frozenset[int], ...]
    """Experts that this server can run, by layer."""
    has_encoder: bool = False

    @staticmethod
    def of(view: MoEView, server: int, server_count: int) -> Geometry:
        """Of a server with this view."""
        spec = view.spec
        return Geometry(
            layer_count=spec.layer_count,
            server=server,
            server_count=server_count,
            hidden_size=spec.hidden_size,
            widths=view.widths,
            top_k=spec.top_k,
            vocab_size=spec.vocab_size,
            context_length=spec.context_length,
            loaded=view.loaded,
            has_encoder=isinstance(view, EncoderDecoderView),
        )

    def is_server(self, *servers: int) -> bool:
        return all(0 <= server < self.server_count for server in servers)


def check(geometry: Geometry, sender: int, message: Message, tensors: Sequence[Tensor]) -> None:
    """Raise `MalformedMessage` unless the message can be acted upon and `sender` may send it."""
    if not (comes_from(sender, message) and _makes_sense(geometry, sender, message, tensors)):
        raise MalformedMessage(type(message).__name__)


def _makes_sense(
    geometry: Geometry, sender: int, message: Message, tensors: Sequence[Tensor]
) -> bool:
    vocab_size, positions = geometry.vocab_size, geometry.context_length
    match message:
        case Prompt():
            good = _is_prompt(geometry, message, tensors)
        case Start():
            good = _are_within(geometry, message.rows)
            good = good and len(message.tokens) == message.rows.total
            good = good and set(message.rows.counts) == {1}
            good = good and all_below(message.tokens, vocab_size)
        case Dispatch() | Partial() | Onward() | Propagate():
            good = _are_rows(geometry, message, tensors)
            # A server's own share never travels.
            own = isinstance(message, Partial) and message.raw
            good = good and (not own or sender == geometry.server)
        case Reserve():
            good = len(message.route) == geometry.layer_count
            good = good and geometry.is_server(*message.route)
            good = good and can_sample(message.sampling, message.seen) and _is_prefix(message)
            good = good and can_draw(message.sampling, vocab_size) and message.budget >= 0.0
            good = good and (message.seen is None or _is_seen(geometry, message.seen))
            good = good and 0 <= message.trimmed <= positions
            good = good and (not geometry.has_encoder or _is_source(geometry, tensors))
        case Granted():
            good = 0 <= message.kept <= positions
        case Withdraw():
            good = all_below((message.start, message.epoch), positions + 1)
        case Tokens():
            good = are_tokens(message.tokens, vocab_size, positions)
        case Followed():
            good = are_told_after(message.after, vocab_size, positions)
        case Running(count=count):
            good = is_count(count)
        case LoadReport():
            counts = {len(message.delay_s), len(message.bandwidth_bytes_per_s)}
            good = counts == {geometry.server_count} and geometry.is_server(*message.unreachable)
            good = good and len(message.loss_weights) <= MOST_WEIGHTS
            good = good and all(is_share(each) for each in message.loss_weights)
            good = good and is_share(message.kv_usage) and is_count(message.running)
            good = good and is_share(message.prompts) and is_rate(message.tokens_per_s)
            vitals = message.vitals
            good = good and (vitals is None or _are_vitals(geometry, vitals))
        case _:
            good = True
    return good


def _are_vitals(geometry: Geometry, vitals: Vitals) -> bool:
    counts = (vitals.queued, vitals.tokens, vitals.memory_bytes, *vitals.sent_bytes)
    return (
        len(vitals.sent_bytes) == geometry.server_count
        and all(0 <= count < 1 << 63 for count in counts)
        and 0.0 <= vitals.uptime_s < math.inf
    )


def _is_prompt(geometry: Geometry, message: Prompt, tensors: Sequence[Tensor]) -> bool:
    if len(tensors) != 1:
        return False
    (ids,) = tensors
    if ids.ndim != 1 or ids.dtype != torch.int32 or ids.numel() == 0:
        return False
    known = int(ids.min()) >= 0 and int(ids.max()) < geometry.vocab_size
    room = geometry.context_length - ids.numel()
    known = known and message.wants >= 0
    return known and 0 <= message.start <= room and 0 <= message.epoch <= geometry.context_length


def _is_seen(geometry: Geometry, seen: SeenSpec) -> bool:
    return len(seen.tokens) <= geometry.context_length and all_below(
        seen.tokens, geometry.vocab_size
    )


def _are_within(geometry: Geometry, rows: Rows) -> bool:
    """Whether rows agree with one another, and are of tokens and positions that there may be."""
    positions = geometry.context_length
    return (
        rows.well_formed()
        and all_below((access_of(each) for each in rows.sequences), geometry.server_count)
        and all(
            start + count <= positions
            for start, count in zip(rows.starts, rows.counts, strict=True)
        )
        and all_below(rows.offsets, positions)
        and all_below(rows.epochs, positions + 1)
        and all_below(rows.tokens, geometry.vocab_size, UNKNOWN)
    )


def prompt(
    to: int, sequence: int, ids: Sequence[int], *, start: int = 0, epoch: int = 0, wants: int = 0
) -> Parcel:
    """The tokens that a sequence begins with, from position `start` on, to the server of its first
    layer; `wants` as of `Rows`."""
    tokens = (torch.tensor(ids[start:], dtype=torch.int32),)
    return Parcel(to=to, message=Prompt(sequence, start, epoch, wants), tensors=tokens)


def _is_source(geometry: Geometry, tensors: Sequence[Tensor]) -> bool:
    """Whether what an encoder made of a prompt is there."""
    if len(tensors) != 1 or tensors[0].dim() != 2 or not tensors[0].is_floating_point():
        return False
    length, size = tensors[0].shape
    return 0 < length <= geometry.context_length and size == geometry.hidden_size


def _is_prefix(asked: Reserve) -> bool:
    """Whether what a sequence is to begin with, if anything, is of the same server's users."""
    prefix = asked.prefix
    return prefix is None or (
        prefix.sequence >= 0
        and prefix.length > 0
        and access_of(prefix.sequence) == access_of(asked.sequence)
    )


def _are_rows(
    geometry: Geometry,
    message: Dispatch | Partial | Onward | Propagate,
    tensors: Sequence[Tensor],
) -> bool:
    """Whether rows, states and what else comes with them agree."""
    if not (0 <= message.layer < geometry.layer_count and _are_within(geometry, message.rows)):
        return False
    total = message.rows.total
    wide = message.wide if isinstance(message, Partial | Onward) else []
    if not _are_chosen(wide, total) or len(tensors) < 1 + bool(wide):
        return False
    width = _width(geometry, message)
    shape = (total - len(wide), width)
    if tensors[0].shape != shape or tensors[0].dtype not in _STATES:
        return False
    if wide:
        shape, sums, tensors = (len(wide), width), tensors[1], tensors[1:]
        if sums.shape != shape or sums.dtype not in _SUMS:
            return False
    units, slots = len(message.rows.sequences), 0
    if isinstance(message, Dispatch):
        slots = total
        if len(message.destinations) != units or not geometry.is_server(*message.destinations):
            return False
        if not _is_checked(geometry, message.checks):
            return False
    elif isinstance(message, Partial):
        if not _is_checked(geometry, message.checks) or (message.raw and message.checks != NOBODY):
            return False
    elif isinstance(message, Onward):
        slots = len(message.raw)
        if not _is_onward(geometry, message):
            return False
    elif isinstance(message, Propagate) and set(message.rows.counts) != {1}:
        return False
    return _are_slots(geometry, message.layer, slots, tensors[1:])


def _width(geometry: Geometry, message: Dispatch | Partial | Onward | Propagate) -> int:
    """Of the states that come with a message."""
    match message:
        case Dispatch():
            return geometry.widths.attended
        case Partial():
            return geometry.widths.moving if message.raw else geometry.widths.part
        case Onward():
            return geometry.widths.moving
        case _:
            return geometry.hidden_size


def _is_onward(geometry: Geometry, message: Onward) -> bool:
    units = len(message.rows.sequences)
    raw = message.raw
    return (
        len(message.awaited) == len(message.probes) == units
        and all(geometry.is_server(*servers) for servers in message.awaited)
        and all_below(message.probes, geometry.vocab_size, NO_TOKEN)
        and len(message.checked) in (0, units)
        and all(
            geometry.is_server(first, second) and first in awaited
            for awaited, checks in zip(
                message.awaited, message.checked or [[]] * units, strict=True
            )
            for first, second in checks
        )
        and _are_chosen(raw, message.rows.total)
        and not set(raw).intersection(message.wide)
        and not message.rows.offsets
        and len(message.spent) in (0, message.rows.total)
        and all(0.0 <= loss < math.inf for loss in message.spent)
        and (not message.decoding or set(message.rows.counts) == {1})
        and (not message.entering or message.layer + 1 < geometry.layer_count)
    )


def _is_checked(geometry: Geometry, server: int) -> bool:
    return server == NOBODY or geometry.is_server(server)


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
