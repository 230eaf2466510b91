"""Closing the books of tokens that are done: what they are charged, receipts and ledgers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimmoe.core.events import Receipt
from trimmoe.core.ledger import Kind, Ledger
from trimmoe.core.profile import ExitState
from trimmoe.core.specs import IntArray
from trimmoe.core.wave import NOT_PROBED, Wave
from trimmoe.cost.model import Accounting, CostModel


def closed(
    cost: CostModel, routes: IntArray, wave: Wave, rows: IntArray, exit_state: ExitState
) -> Wave:
    """Charge an exit to the budget and, if it is one, the way of its state through the layers
    left; and the way of the token back to its user.

    The former is off the critical path: it costs messages, not delay. A frozen state goes to
    every later server of the route, another passes from one to the next. Under `migrate` the KV
    cache is free by definition.
    """
    back_s = cost.token_transfer_s[wave.server[rows], wave.access[rows]]
    wave = wave.at(rows, delay_s=wave.delay_s[rows] + back_s)
    if wave.layer == cost.layer_count:
        return wave
    charged = wave.exit_loss[rows]
    wave = wave.at(
        rows,
        loss=wave.loss[rows] + charged,
        allowance=np.maximum(wave.allowance[rows] - charged, 0.0),
    )
    if cost.accounting is Accounting.MIGRATE:
        return wave
    messages = wave.messages.copy()
    for row in rows:
        server, later = wave.server[row], routes[wave.route[row], wave.layer :]
        if exit_state is ExitState.FROZEN:
            later = np.unique(later)
            messages[row, server, later[later != server]] += 1
        else:
            source = np.append(server, later[:-1])
            hops = source != later
            np.add.at(messages[row], (source[hops], later[hops]), 1)
    return replace(wave, messages=messages)


def receipt(cost: CostModel, wave: Wave, row: int) -> Receipt:
    """What a token tells the account of its sequence, wherever that is."""
    exited = wave.layer < cost.layer_count
    return Receipt(
        sequence=wave.sequences[row],
        balance=float(wave.allowance[row]),
        budget=float(wave.budget[row]),
        loss=float(wave.loss[row]),
        delay_s=float(wave.delay_s[row]),
        exit_confidence=float(wave.confidence[row]) if exited else None,
    )


def ledger(cost: CostModel, wave: Wave, row: int) -> Ledger:
    """What every layer did to a token, and what that cost."""
    kinds = np.zeros((cost.layer_count, len(Kind)), dtype=np.int64)
    kinds[np.arange(cost.layer_count), wave.kinds[row]] = 1
    return Ledger(
        tokens=1,
        kinds=kinds,
        slots_run=int(wave.slots_run[row]),
        slots_dropped=int(wave.slots_dropped[row]),
        messages=wave.messages[row],
        hidden_bytes=cost.hidden_bytes,
        delay_s=float(wave.delay_s[row]),
        loss=float(wave.loss[row]),
        budget=float(wave.budget[row]),
        audits=int(wave.probed[row] != NOT_PROBED),
    )
