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
    messages, server = wave.messages.copy(), wave.server[rows]
    later = routes[wave.route[rows], wave.layer :]
    if exit_state is ExitState.FROZEN:
        told, one = np.zeros((rows.size, cost.server_count), dtype=bool), np.arange(rows.size)
        told[one[:, None], later] = True
        told[one, server] = False
        messages[rows, server] += told
    else:
        source = np.concatenate([server[:, None], later[:, :-1]], axis=1)
        row, at = np.nonzero(source != later)
        np.add.at(messages, (rows[row], source[row, at], later[row, at]), 1)
    return replace(wave, messages=messages)


def receipts(cost: CostModel, wave: Wave) -> tuple[Receipt, ...]:
    """What the tokens of a closed wave tell the accounts of their sequences, wherever those are."""
    exited = wave.layer < cost.layer_count
    columns = (wave.allowance, wave.budget, wave.loss, wave.delay_s, wave.confidence)
    rows = zip(wave.sequences, *(column.tolist() for column in columns), strict=True)
    return tuple(
        Receipt(
            sequence=sequence,
            balance=balance,
            budget=budget,
            loss=loss,
            delay_s=delay_s,
            exit_confidence=confidence if exited else None,
        )
        for sequence, balance, budget, loss, delay_s, confidence in rows
    )


def ledgers(cost: CostModel, wave: Wave) -> tuple[Ledger, ...]:
    """What every layer did to each token of a closed wave, and what that cost."""
    kinds = (wave.kinds[:, :, None] == np.arange(len(Kind))).astype(np.int64)
    columns = (wave.slots_run, wave.slots_dropped, wave.delay_s, wave.loss, wave.budget)
    audits = (wave.probed != NOT_PROBED).astype(np.int64)
    rows = zip(kinds, wave.messages, *(each.tolist() for each in (*columns, audits)), strict=True)
    return tuple(
        Ledger(
            tokens=1,
            kinds=kind,
            slots_run=run,
            slots_dropped=dropped,
            messages=messages,
            hidden_bytes=cost.hidden_bytes,
            delay_s=delay_s,
            loss=loss,
            budget=budget,
            audits=audited,
        )
        for kind, messages, run, dropped, delay_s, loss, budget, audited in rows
    )
