"""The end of a token's way: head, sampling, and what it leaves in the layers it did not run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.events import Complete, Receipt, Trailed
from trimmoe.core.exit_states import ExitState
from trimmoe.core.ledger import Ledger
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.node.compute.end_drafts import EndDrafts
from trimmoe.runtime.node.compute.runner import ModelRunner
from trimmoe.runtime.node.records.messages import NO_TOKEN, Followed, Parcel, Propagate, Tokens
from trimmoe.runtime.node.records.packing import pack_ledger, pack_receipt
from trimmoe.runtime.node.records.tokens import (
    After,
    ChargeSpec,
    LedgerSpec,
    ReceiptSpec,
    ScoreSpec,
    Token,
)
from trimmoe.runtime.node.records.units import Unit, rows_of
from trimmoe.runtime.sampling import draw
from trimmoe.runtime.scores import Score

Told = TypeVar("Told", After, Token)


def completed(
    runner: ModelRunner,
    settings: PolicySettings,
    end_drafts: EndDrafts,
    command: Complete,
    units: Sequence[Unit],
    hidden: Tensor,
) -> list[Parcel]:
    """Predict from the last states [n, d]: tokens to their access servers, states onward."""
    propagating: list[Parcel] = []
    state = settings.readings.exit_state
    exits = command.layer < runner.view.spec.layer_count
    if not exits:
        hidden = _tail(runner, units, hidden)
    elif state is ExitState.FROZEN:
        propagating = _propagated(command.layer, units, hidden)
    elif state is ExitState.DENSE:
        propagating = trailing(command.layer, units, hidden)
    receipts: dict[int, deque[Receipt]] = {}
    for each in command.receipts:
        receipts.setdefault(each.sequence, deque()).append(each)
    drafts = exits and settings.drafts
    tokens: list[Token] = []
    logits = runner.view.logits(hidden)
    for unit, scores, ledger in zip(units, logits, command.ledgers, strict=True):
        left = receipts.get(unit.seat.sequence)
        receipt = left.popleft() if left else None
        token = token_of(
            unit,
            scores,
            ledger=pack_ledger(ledger),
            receipt=None if receipt is None else pack_receipt(receipt),
            agrees=None if unit.probe == NO_TOKEN else unit.probe == int(scores.argmax()),
            draft=drafts,
        )
        tokens.append(token)
        if exits:
            unit.probe = token.token if drafts else int(scores.argmax())
    if not exits:
        tokens = end_drafts.generated(units, hidden, tokens)
    return to_users(units, tokens) + propagating


def trailed(
    runner: ModelRunner,
    settings: PolicySettings,
    command: Trailed,
    units: Sequence[Unit],
    hidden: Tensor,
) -> list[Parcel]:
    """What full depth says of tokens that were predicted before it, from last states [n, d]."""
    logits = runner.view.logits(_tail(runner, units, hidden))
    drafts = settings.drafts
    told = []
    for row, (unit, scores) in enumerate(zip(units, logits, strict=True)):
        token = token_of(unit, scores) if drafts else None
        agrees = unit.probe == (int(scores.argmax()) if token is None else token.token)
        ledgers = command.ledgers if agrees or not command.missed else command.missed
        ledger = pack_ledger(ledgers[row])
        told.append(After(sequence=unit.seat.sequence, ledger=ledger, agrees=agrees, token=token))
    return _followed(units, told)


def withdrawn(units: Sequence[Unit], hidden_bytes: int) -> list[Parcel]:
    """What units cost that were withdrawn, to their access servers."""
    lost, told = [unit for unit in units if unit.wave is not None], []
    for unit in lost:
        assert unit.wave is not None
        sent = unit.wave.messages[unit.row]
        empty = Ledger.empty(unit.wave.kinds.shape[1], sent.shape[0], hidden_bytes)
        ledger = pack_ledger(replace(empty, messages=sent))
        told.append(After(sequence=unit.seat.sequence, ledger=ledger, agrees=None))
    return _followed(lost, told)


def _followed(units: Sequence[Unit], told: Sequence[After]) -> list[Parcel]:
    """One message to each access server."""
    by_access = _by_access(units, told).items()
    return [Parcel(to=access, message=Followed(after=each)) for access, each in by_access]


def _tail(runner: ModelRunner, units: Sequence[Unit], hidden: Tensor) -> Tensor:
    batch = runner.batch(units)
    return batch.pack(runner.view.tail(batch.unpack(hidden), batch, runner.cache))


def token_of(
    unit: Unit,
    logits: Tensor,
    *,
    ledger: LedgerSpec | None = None,
    receipt: ReceiptSpec | None = None,
    agrees: bool | None = None,
    charge: ChargeSpec | None = None,
    draft: bool = False,
    scores: Sequence[Score] = (),
) -> Token:
    """The token drawn after the unit's last row."""
    position = unit.start + unit.count
    drawn = draw(logits, unit.seat.sampling, position, unit.seat.seen)
    return Token(
        sequence=unit.seat.sequence,
        position=position,
        token=drawn.token,
        logprob=drawn.logprob,
        top=list(drawn.top),
        ledger=ledger,
        receipt=receipt,
        agrees=agrees,
        charge=charge,
        epoch=unit.epoch,
        draft=draft,
        scores=[ScoreSpec(each.token, each.logprob, each.rank, list(each.top)) for each in scores],
    )


def to_users(units: Sequence[Unit], tokens: Sequence[Token]) -> list[Parcel]:
    """One message to each access server."""
    by_access = _by_access(units, tokens).items()
    return [Parcel(to=access, message=Tokens(tokens=each)) for access, each in by_access]


def _by_access(units: Sequence[Unit], told: Sequence[Told]) -> dict[int, list[Told]]:
    """What is told of each unit, by the access server that is told."""
    found: dict[int, list[Told]] = {}
    for unit, one in zip(units, told, strict=True):
        found.setdefault(unit.seat.access, []).append(one)
    return found


def _propagated(layer: int, units: Sequence[Unit], hidden: Tensor) -> list[Parcel]:
    """Frozen states to each later server of the routes."""
    later = [frozenset(unit.seat.route[layer:]) for unit in units]
    return _states_to(later, layer, units, hidden, frozen=True)


def trailing(layer: int, units: Sequence[Unit], hidden: Tensor) -> list[Parcel]:
    """States that go on without routed experts to where `layer` is run."""
    following = [frozenset([unit.seat.route[layer]]) for unit in units]
    return _states_to(following, layer, units, hidden, frozen=False)


def _states_to(
    servers: Sequence[frozenset[int]],
    layer: int,
    units: Sequence[Unit],
    hidden: Tensor,
    *,
    frozen: bool,
) -> list[Parcel]:
    """One message to each of the `servers` of any unit."""
    parcels = []
    for server in sorted(frozenset().union(*servers)):
        which = np.array([row for row, those in enumerate(servers) if server in those])
        chosen = [units[row] for row in which.tolist()]
        message = Propagate(layer=layer, rows=rows_of(chosen), frozen=frozen)
        parcels.append(
            Parcel(to=server, message=message, tensors=(hidden[torch.from_numpy(which)],))
        )
    return parcels
