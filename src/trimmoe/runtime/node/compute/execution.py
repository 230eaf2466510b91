"""Doing what the engine decided for generated tokens of one layer.

What needs nothing that is computed here does not wait for what does: dispatches leave, and tokens
without slots on this server go on, before this server's own slots are run.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from trimmoe.core.specs import IntArray
from trimmoe.core.wave import Wave
from trimmoe.runtime.node.compute.runner import ModelRunner
from trimmoe.runtime.node.compute.shipping import Cargo, Split, dispatched, onward
from trimmoe.runtime.node.records.messages import Parcel
from trimmoe.runtime.node.records.output import BatchOutput


def run_and_ship(
    runner: ModelRunner,
    depart: Callable[[IntArray], Wave],
    cargo: Cargo,
    split: Split,
    normed: Tensor,
    result: BatchOutput,
    *,
    entering: bool,
) -> None:
    """Fill in the cargo's output, [n, d], and send the rows that leave; `normed` [n, d].

    `depart` gives what the engine has of some of the rows; `entering`: whether it has them about
    to enter the next layer already.
    """
    experts, leaves = split.at(runner.server), split.leaves

    def run(which: IntArray) -> None:
        if which.size:
            staying, leaving = which[~leaves[which]], which[leaves[which]]
            if runner.view.widths.moving == cargo.attended.shape[1]:
                give(which, runner.view.gathered)
            else:
                give(leaving, runner.view.gathered_part)
                give(staying, runner.view.gathered)

    def give(which: IntArray, how: Callable[..., Tensor]) -> None:
        if which.size:
            at = torch.from_numpy(which)
            rows = cargo.attended[at], experts[which], cargo.gates[at]
            made = how(cargo.layer, *rows, normed=normed[at])
            cargo.output[at, : made.shape[1]] = made

    def ship(which: IntArray) -> list[Parcel]:
        if not which.size:
            return []
        return onward(cargo, split, which, depart(which), entering=entering)

    works = split.used[:, runner.server]
    light, rest = np.flatnonzero(leaves & ~works), np.flatnonzero(works | ~leaves)
    # Of raw rows the shared expert runs where they gather.
    run(light[~split.raw[light]])
    runner.verifier.choose(cargo, split, np.flatnonzero(leaves))
    parcels = dispatched(cargo, split, np.flatnonzero(leaves)) + ship(light)
    if not rest.size:
        result.parcels += parcels
        return
    runner.emit(parcels, result)
    run(rest)
    runner.pace.experts(cargo.layer, experts)
    result.parcels += ship(np.flatnonzero(leaves & works))
