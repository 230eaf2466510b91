"""The books of tokens: what decisions and exits are charged, receipts and ledgers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trimmoe.core.events import Receipt, Trailed
from trimmoe.core.exit_states import ExitState
from trimmoe.core.ledger import Kind, Ledger, layer_kinds
from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.core.wave import NOT_PROBED, Wave
from trimmoe.cost.model import Accounting, CostModel, add_layer_messages
from trimmoe.cost.nearest import Nearest, pass_layers
from trimmoe.policy.base import Decision
from trimmoe.policy.relaxed import FLIP


def entered(cost: CostModel, wave: Wave, experts: IntArray, decision: Decision) -> Wave:
    """What was decided for the rows alive in one layer, whose activated sets are `experts`
    [n, k]."""
    rows, server = wave.alive, wave.server[wave.alive]
    where, made = (decision.slot_expert, decision.slot_server), wave.copy()
    add_layer_messages(cost, made.messages, rows, server, decision.destination, *where)
    made.kinds[rows, wave.layer] = layer_kinds(
        *where, experts, server, expert_count=cost.expert_s.shape[2]
    )
    run = (decision.slot_expert >= 0).sum(-1)
    dropped = np.where(run > 0, decision.slot_expert.shape[1] - run, 0)
    spent_s = decision.delay_s + cost.dense_s[server, wave.layer]
    made.put(
        rows,
        allowance=np.maximum(wave.allowance[rows] - decision.loss, 0.0),
        loss=wave.loss[rows] + decision.loss,
        delay_s=wave.delay_s[rows] + spent_s,
        ahead=decision.ahead,
        slots_run=wave.slots_run[rows] + run,
        slots_dropped=wave.slots_dropped[rows] + dropped,
        server=decision.destination,
    )
    return made


def passed(
    nearest: Nearest, wave: Wave, experts: IntArray, settled: int
) -> tuple[Wave, IntArray, IntArray]:
    """What layers cost a wave's rows, all alive, in which nothing was decided: the same as
    `entered` says of each of them, one after another.

    `experts` [n, L, k] and `settled` as in `SegmentRan`. If L is one more, the servers of that
    layer's slots, [n, k], and where it gathers, [n], -1 for rows that nobody can serve.
    """
    made = wave.copy(layer=wave.layer + settled)
    count, _, slots = experts.shape
    server, destination = np.zeros((count, slots), dtype=np.int64), np.zeros(count, dtype=np.int64)
    words = made.words
    rows = words, words.view(np.float64), made.messages
    chosen = np.ascontiguousarray(experts)
    pass_layers(nearest, wave.layer, *rows, chosen, settled, server, destination)
    return made, server, destination


def closed(
    cost: CostModel, routes: IntArray, wave: Wave, rows: IntArray, exit_state: ExitState
) -> Wave:
    """Charge an exit to the budget and, if it is one, the way of its state through the layers
    left; and the way of the token back to its user.

    The former is off the critical path: it costs messages, not delay. A frozen state goes to
    every later server of the route, one without routed experts passes from one to the next, and
    what a token costs that goes on whole is only known when it has, see `afterwards`. Under
    `migrate` the KV cache is free by definition.
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
    if cost.accounting is Accounting.MIGRATE or exit_state is ExitState.WHOLE:
        return wave
    made, server = wave.copy(), wave.server[rows]
    messages = made.messages
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
    return made


def following(cost: CostModel, wave: Wave, rows: IntArray) -> Wave:
    """The wave with `rows` answered: they go on exactly, and their books begin anew, less the way
    back to the user, which they were charged from here."""
    back_s = cost.token_transfer_s[wave.server[rows], wave.access[rows]]
    return wave.at(
        rows,
        answered_s=wave.delay_s[rows] + back_s,
        probed=np.array(wave.layer - 1),
        allowance=np.array(0.0),
        messages=np.zeros_like(wave.messages[rows]),
        delay_s=-back_s,
        slots_run=np.array(0),
        slots_dropped=np.array(0),
    )


def afterwards(cost: CostModel, wave: Wave, *, drafts: bool) -> tuple[Ledger, ...]:
    """What the answered tokens of a wave cost until its end, where that is in nobody's way; under
    `migrate` nothing.

    It is in the way of drafts: nothing sets out on one before that ahead of it is confirmed, so two
    of them take at least as long as one token at full depth, and each is charged half of that.
    """
    waits_s = np.zeros(len(wave.sequences))
    if drafts:
        whole_s = wave.answered_s + _late_s(cost, wave)
        waits_s = np.maximum(whole_s / 2 - wave.answered_s, 0.0)
    free = cost.accounting is Accounting.MIGRATE
    sent = np.zeros_like(wave.messages) if free else wave.messages
    kinds = np.zeros((cost.layer_count, len(Kind)), dtype=np.int64)
    return tuple(
        _trailing(cost, kinds, messages, 0, 0, wait_s)
        for messages, wait_s in zip(sent, waits_s.tolist(), strict=True)
    )


def _trailing(
    cost: CostModel, kinds: IntArray, messages: IntArray, run: int, dropped: int, delay_s: float
) -> Ledger:
    """What one token costs beside the ledger it was completed with."""
    return Ledger(
        tokens=0,
        kinds=kinds,
        slots_run=run,
        slots_dropped=dropped,
        messages=messages,
        hidden_bytes=cost.hidden_bytes,
        delay_s=delay_s,
        loss=0.0,
        budget=0.0,
        audits=1,
    )


def _late_s(cost: CostModel, wave: Wave) -> FloatArray:
    """How much later than their predictions word of full depth comes to the users, [n]."""
    return wave.delay_s + cost.token_transfer_s[wave.server, wave.access]


def missed(cost: CostModel, wave: Wave, told: tuple[Ledger, ...]) -> tuple[Ledger, ...]:
    """What is `told` of them afterwards where everybody waited for it, since the prediction that
    was early was wrong: with the time it took and what was done in the layers that were taken to be
    left out."""
    layers = np.arange(cost.layer_count)
    later = layers > wave.probed[:, None]
    kinds = (wave.kinds[:, :, None] == np.arange(len(Kind))).astype(np.int64)
    kinds[:, :, Kind.EXITED] -= 1
    kinds *= later[:, :, None]
    columns = (wave.slots_run, wave.slots_dropped, _late_s(cost, wave))
    rows = zip(told, kinds, *(each.tolist() for each in columns), strict=True)
    return tuple(
        _trailing(cost, kind, after.messages, run, dropped, delay_s)
        for after, kind, run, dropped, delay_s in rows
    )


def checked(command: Trailed, agrees: Sequence[bool]) -> tuple[Ledger, ...]:
    """What rows cost after their exits, which `agrees` says were right, where what set out on a
    draft is not followed: if that was wrong, it is taken to have sent meanwhile as much as the row
    itself has."""
    if not command.missed:
        return command.ledgers
    told = zip(command.ledgers, command.missed, agrees, strict=True)
    return tuple(
        after if right else replace(miss, messages=2 * miss.messages) for after, miss, right in told
    )


def flipped(ledger: Ledger) -> Ledger:
    """The ledger of a token that predicts what is not kept, but a guess in its place."""
    return replace(ledger, loss=ledger.loss + FLIP)


def flip(sequence: int) -> Receipt:
    """What such a guess leaves to the account of its sequence beside its token's own receipt."""
    return Receipt(sequence=sequence, budget=0.0, loss=FLIP, delay_s=0.0, exit_confidence=None)


def receipts(cost: CostModel, wave: Wave) -> tuple[Receipt, ...]:
    """What the tokens of a closed wave tell the accounts of their sequences, wherever those are."""
    exited = wave.layer < cost.layer_count
    columns = (wave.budget, wave.loss, wave.delay_s, wave.confidence)
    rows = zip(wave.sequences, *(column.tolist() for column in columns), strict=True)
    return tuple(
        Receipt(
            sequence=sequence,
            budget=budget,
            loss=loss,
            delay_s=delay_s,
            exit_confidence=confidence if exited else None,
        )
        for sequence, budget, loss, delay_s, confidence in rows
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
