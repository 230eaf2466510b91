"""Prompts that a policy trims, in the process that has the whole model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.changed import changed
from trimmoe.core.events import Attend, Command, Complete, Event, Execute, SequenceOpened
from trimmoe.core.ledger import Ledger
from trimmoe.engine.feedback import Feedback
from trimmoe.engine.prompts import entered
from trimmoe.engine.step import Engine
from trimmoe.runtime.execution import Execution

WAVE = 0


def read_trimmed(
    execution: Execution,
    engine: Engine,
    feedback: Feedback,
    opened: Sequence[SequenceOpened],
    *,
    slots: Sequence[int],
    tokens: Sequence[Sequence[int]],
    trimmed: Sequence[int],
) -> tuple[Tensor, list[Ledger]]:
    """Read sequences from their first token on: `tokens` of each, in its cache slot, of which the
    first so many are `trimmed` within the budget it is opened with and the others run exactly.

    Returns what `logits` takes of the last token of each, [S, d], and what the tokens of each
    spent, as ledgers of no generated token.
    """
    lengths = [len(ids) for ids in tokens]
    owners = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    # The rows of a slot stand together; which sequence comes first makes no difference.
    running = execution.begin(
        [slots[owner] for owner in owners.tolist()],
        positions.tolist(),
        [token for ids in tokens for token in ids],
    )
    may_spend = positions < np.array(trimmed)[owners]
    state, attend = entered(engine, feedback, opened, owners, may_spend, wave=WAVE)
    pending: list[Command] = [attend]
    while True:
        command = pending.pop(0)
        event: Event
        match command:
            case Attend():
                event = execution.attend(command, running)
            case Execute():
                executed = execution.execute(command, running)
                # None of them leaves early, whatever its state looks like.
                last = np.full_like(executed.exit_at, engine.cost.layer_count)
                event = changed(executed, exit_at=last)
            case Complete():
                assert not pending
                assert command.rows.size == owners.size
                ends = np.cumsum(lengths) - 1
                states = execution.complete(command, running)[torch.from_numpy(ends)]
                return states, _charges(command.ledgers, lengths)
            case _:
                raise AssertionError("one process holds every expert, and no prompt exits")
        state, commands = engine.step(state, event)
        pending += commands


def _charges(ledgers: Sequence[Ledger], lengths: Sequence[int]) -> list[Ledger]:
    """What each sequence spent, of ledgers of its tokens one after another; a token that spent
    anything was credited its budget, and nothing is left of it."""
    charges, start = [], 0
    for length in lengths:
        spent = [one for one in ledgers[start : start + length] if one.loss > 0]
        kinds, messages = ledgers[start].kinds, ledgers[start].messages
        empty = Ledger.empty(kinds.shape[0], messages.shape[0], ledgers[start].hidden_bytes)
        loss, budget = (sum(getattr(one, name) for one in spent) for name in ("loss", "budget"))
        charges.append(replace(empty, loss=loss, budget=budget))
        start += length
    return charges
