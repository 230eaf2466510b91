"""The end of a token's way: head, sampling, and its last state for the layers it did not enter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.events import Complete
from trimmoe.runtime.node.messages import (
    NO_TOKEN,
    ChargeSpec,
    LedgerSpec,
    Parcel,
    Propagate,
    ReceiptSpec,
    Rows,
    Token,
    Tokens,
)
from trimmoe.runtime.node.passengers import pack_ledger, pack_receipt
from trimmoe.runtime.node.units import Unit
from trimmoe.runtime.sampling import draw

if TYPE_CHECKING:
    from trimmoe.runtime.node.executor import Executor


def completed(
    worker: Executor, command: Complete, units: Sequence[Unit], hidden: Tensor
) -> list[Parcel]:
    """Predict from the last states [n, d]: tokens to their access servers, states onward."""
    propagating: list[Parcel] = []
    if command.layer < worker.view.spec.layer_count:
        propagating = _propagated(command.layer, units, hidden)
    else:
        batch = worker.batch(units)
        hidden = batch.pack(worker.view.tail(batch.unpack(hidden), batch, worker.cache))
    receipts = {receipt.sequence: receipt for receipt in command.receipts}
    tokens = []
    logits = worker.view.logits(hidden)
    for unit, scores, ledger in zip(units, logits, command.ledgers, strict=True):
        receipt = receipts.get(unit.seat.sequence)
        tokens.append(
            token_of(
                unit,
                scores,
                ledger=pack_ledger(ledger),
                receipt=None if receipt is None else pack_receipt(receipt),
                agrees=None if unit.probe == NO_TOKEN else unit.probe == int(scores.argmax()),
            )
        )
    return to_users(units, tokens) + propagating


def token_of(
    unit: Unit,
    logits: Tensor,
    *,
    ledger: LedgerSpec | None = None,
    receipt: ReceiptSpec | None = None,
    agrees: bool | None = None,
    charge: ChargeSpec | None = None,
) -> Token:
    """The token drawn after the unit's last row."""
    position = unit.start + unit.count
    drawn = draw(logits, unit.seat.sampling, position)
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
    )


def to_users(units: Sequence[Unit], tokens: Sequence[Token]) -> list[Parcel]:
    """One message to each access server."""
    by_access: dict[int, list[Token]] = {}
    for unit, token in zip(units, tokens, strict=True):
        by_access.setdefault(unit.seat.access, []).append(token)
    return [Parcel(to=access, message=Tokens(tokens=each)) for access, each in by_access.items()]


def _propagated(layer: int, units: Sequence[Unit], hidden: Tensor) -> list[Parcel]:
    """Exit states to each later server of the routes."""
    later = [frozenset(unit.seat.route[layer:]) for unit in units]
    parcels = []
    for server in sorted(frozenset().union(*later)):
        which = np.array([row for row, servers in enumerate(later) if server in servers])
        chosen = [units[row] for row in which.tolist()]
        rows = Rows(
            [unit.seat.sequence for unit in chosen],
            [unit.start for unit in chosen],
            [1] * len(chosen),
            [],
        )
        message = Propagate(layer=layer, rows=rows)
        parcels.append(
            Parcel(to=server, message=message, tensors=(hidden[torch.from_numpy(which)],))
        )
    return parcels
