"""Tokens in flight: what the engine knows of each, and what travels with it between servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from trimmoe.core.changed import changed
from trimmoe.core.specs import BoolArray, FloatArray, IntArray

NOT_PROBED = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Wave:
    """n tokens on their way through the layers, with everything that decisions about them need.

    Rows may leave for another server and join a wave there: nothing about a token is kept
    anywhere else, but the account of its sequence. Shapes as in `core.ledger.Ledger`.
    """

    layer: int
    sequences: tuple[int, ...]
    alive: IntArray
    """Rows that have not completed, ascending."""
    draws: FloatArray
    access: IntArray
    route: IntArray
    """Row of the engine's routes, [n]."""
    server: IntArray
    loss_weight: FloatArray
    """omega_D in force when the token arrived, [n]."""
    exit_loss: FloatArray
    """Quality loss charged if it exits, [n]."""
    ahead: FloatArray
    """What is expected still to come if it goes on, in units of step cost; infinite where the
    policy does not say, [n]."""
    confidence_needed: FloatArray
    """p of each token, [n]."""
    budget: FloatArray
    allowance: FloatArray
    """Loss each token may still incur, [n]."""
    confidence: FloatArray
    """xi of the last executed layer; -inf before it and after a skip, [n]."""
    exit_at: IntArray
    probed: IntArray
    """Layer after which an exit was due but is being audited, or, once answered, was taken; else
    NOT_PROBED, [n]."""
    answered_s: FloatArray
    """Of what exited and only goes on for the tokens that will attend to it, the delay of its
    prediction; otherwise infinite, [n]."""
    kinds: IntArray
    """[n, N], `Kind.EXITED` until the layer ran or was skipped."""
    slots_run: IntArray
    slots_dropped: IntArray
    messages: IntArray
    """[n, M, M]."""
    delay_s: FloatArray
    loss: FloatArray

    @property
    def answered(self) -> BoolArray:
        """Whether it exited already, [n]."""
        return np.isfinite(self.answered_s)

    def at(self, rows: IntArray, **changes: np.ndarray) -> Wave:
        """A copy with the given columns changed in `rows`."""
        return changed(self, **self.columns(rows, **changes))

    def columns(self, rows: IntArray, **changes: np.ndarray) -> dict[str, np.ndarray]:
        """The given columns as they are with these values in `rows`."""
        columns = {}
        for name, value in changes.items():
            columns[name] = column = getattr(self, name).copy()
            column[rows] = value
        return columns

    def take(self, rows: IntArray) -> Wave:
        """A wave of these rows alone, renumbered from 0, all alive."""
        columns = {name: getattr(self, name)[rows] for name in _COLUMNS}
        sequences = tuple(self.sequences[row] for row in rows.tolist())
        return changed(self, sequences=sequences, alive=np.arange(rows.size), **columns)

    def without(self, rows: IntArray) -> Wave:
        """The same wave with these rows no longer alive in it."""
        if not rows.size:
            return self
        gone = np.zeros(len(self.sequences), dtype=bool)
        gone[rows] = True
        return changed(self, alive=self.alive[~gone[self.alive]])


_COLUMNS = tuple(
    item.name for item in fields(Wave) if item.name not in ("layer", "sequences", "alive")
)


def join_waves(waves: Sequence[Wave]) -> Wave:
    """One wave of all rows of waves that are at the same layer; all their rows are alive."""
    assert waves
    assert len({wave.layer for wave in waves}) == 1
    if len(waves) == 1:
        return waves[0]
    columns = {name: np.concatenate([getattr(wave, name) for wave in waves]) for name in _COLUMNS}
    sequences = tuple(sequence for wave in waves for sequence in wave.sequences)
    return changed(waves[0], sequences=sequences, alive=np.arange(len(sequences)), **columns)
