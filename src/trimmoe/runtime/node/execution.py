"""Doing what the engine decided for generated tokens of one layer.

What needs nothing that is computed here does not wait for what does: dispatches leave, and tokens
without slots on this server go on, before this server's own slots are run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.events import Execute
from trimmoe.core.specs import IntArray
from trimmoe.runtime.node.messages import Parcel
from trimmoe.runtime.node.shipping import Cargo, Split, dispatched, onward

if TYPE_CHECKING:
    from trimmoe.runtime.node.executor import Executor
    from trimmoe.runtime.node.outcome import Outcome


def run_and_ship(
    worker: Executor,
    command: Execute,
    cargo: Cargo,
    split: Split,
    normed: Tensor,
    outcome: Outcome,
    *,
    entering: bool,
) -> None:
    """Fill in the cargo's output, [n, d], and send the rows that leave; `normed` [n, d].

    `entering`: whether the engine has them about to enter the next layer already.
    """
    experts = split.at(worker.server)

    def run(which: IntArray) -> None:
        if which.size:
            at = torch.from_numpy(which)
            rows = cargo.attended[at], experts[which], cargo.gates[at], normed[at]
            cargo.output[at] = worker.run_here(cargo.layer, *rows)

    def ship(which: IntArray) -> list[Parcel]:
        if not which.size:
            return []
        tokens = worker.departed(command.wave, command.rows[which])
        return onward(cargo, split, which, tokens, entering=entering)

    leaves, works = split.leaves, split.used[:, worker.server]
    light, rest = np.flatnonzero(leaves & ~works), np.flatnonzero(works | ~leaves)
    run(light)
    parcels = dispatched(cargo, split, np.flatnonzero(leaves)) + ship(light)
    if not rest.size:
        outcome.parcels += parcels
        return
    worker.emit(parcels, outcome)
    run(rest)
    worker.pace.experts(cargo.layer, experts)
    outcome.parcels += ship(np.flatnonzero(leaves & works))
