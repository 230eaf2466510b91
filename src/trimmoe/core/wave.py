"""Tokens in flight: what the engine knows of each, and what travels with it between servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trimmoe.core.changed import changed
from trimmoe.core.specs import BoolArray, FloatArray, IntArray

NOT_PROBED = -1

FLOATS = (
    "draws",
    "loss_weight",
    "exit_loss",
    "ahead",
    "confidence_needed",
    "budget",
    "allowance",
    "confidence",
    "answered_s",
    "delay_s",
    "loss",
)
INTS = ("access", "route", "server", "exit_at", "probed", "slots_run", "slots_dropped")
SCALARS = len(FLOATS) + len(INTS)
COLUMN = {name: at for at, name in enumerate((*FLOATS, *INTS))}
"""Which word of a row holds what."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wave:
    """n tokens on their way through the layers, with everything that decisions about them need.

    Rows may leave for another server and join a wave there: nothing about a token is kept
    anywhere else, but the account of its sequence. All that is known of a token is one row of
    `words`, so that rows are taken, joined and sent as a whole. N layers, M servers; other shapes
    as in `core.ledger.Ledger`.
    """

    layer: int
    sequences: tuple[int, ...]
    alive: IntArray
    """Rows that have not completed, ascending."""
    layer_count: int
    server_count: int
    words: IntArray
    """The columns below, one after another, [n, `width_of`]; floats by their bits."""

    @staticmethod
    def of(
        *,
        layer: int,
        sequences: tuple[int, ...],
        layer_count: int,
        server_count: int,
        **columns: Any,
    ) -> Wave:
        """A wave of these columns, each an array as below or one value for all rows; all rows are
        alive."""
        assert columns.keys() == {*COLUMN, "kinds", "messages"}
        count = len(sequences)
        wave = Wave(
            layer=layer,
            sequences=sequences,
            alive=np.arange(count),
            layer_count=layer_count,
            server_count=server_count,
            words=np.empty((count, width_of(layer_count, server_count)), dtype=np.int64),
        )
        for name, value in columns.items():
            getattr(wave, name)[:] = value
        return wave

    @property
    def draws(self) -> FloatArray:
        """The uniform number each token arrived with, [n]."""
        return self._column("draws")

    @property
    def access(self) -> IntArray:
        return self._column("access")

    @property
    def route(self) -> IntArray:
        """Row of the engine's routes, [n]."""
        return self._column("route")

    @property
    def server(self) -> IntArray:
        return self._column("server")

    @property
    def loss_weight(self) -> FloatArray:
        """omega_D in force when the token arrived, [n]."""
        return self._column("loss_weight")

    @property
    def exit_loss(self) -> FloatArray:
        """Quality loss charged if it exits, [n]."""
        return self._column("exit_loss")

    @property
    def ahead(self) -> FloatArray:
        """What is expected still to come if it goes on, in units of step cost; infinite where the
        policy does not say, [n]."""
        return self._column("ahead")

    @property
    def confidence_needed(self) -> FloatArray:
        """p of each token, [n]."""
        return self._column("confidence_needed")

    @property
    def budget(self) -> FloatArray:
        return self._column("budget")

    @property
    def allowance(self) -> FloatArray:
        """Loss each token may still incur, [n]."""
        return self._column("allowance")

    @property
    def confidence(self) -> FloatArray:
        """xi of the last executed layer; -inf before it and after a skip, [n]."""
        return self._column("confidence")

    @property
    def exit_at(self) -> IntArray:
        return self._column("exit_at")

    @property
    def probed(self) -> IntArray:
        """Layer after which an exit was due but is being audited, or, once answered, was taken;
        else NOT_PROBED, [n]."""
        return self._column("probed")

    @property
    def answered_s(self) -> FloatArray:
        """Of what exited and only goes on for the tokens that will attend to it, the delay of its
        prediction; otherwise infinite, [n]."""
        return self._column("answered_s")

    @property
    def kinds(self) -> IntArray:
        """[n, N], `Kind.EXITED` until the layer ran or was skipped."""
        return self.words[:, SCALARS : SCALARS + self.layer_count]

    @property
    def slots_run(self) -> IntArray:
        return self._column("slots_run")

    @property
    def slots_dropped(self) -> IntArray:
        return self._column("slots_dropped")

    @property
    def messages(self) -> IntArray:
        """[n, M, M]."""
        servers = self.server_count
        return self.words[:, SCALARS + self.layer_count :].reshape(-1, servers, servers)

    @property
    def delay_s(self) -> FloatArray:
        return self._column("delay_s")

    @property
    def loss(self) -> FloatArray:
        return self._column("loss")

    @property
    def answered(self) -> BoolArray:
        """Whether it exited already, [n]."""
        return np.isfinite(self.answered_s)

    def copy(self, *, layer: int | None = None) -> Wave:
        """The same at a layer, with columns that may be written to."""
        at = self.layer if layer is None else layer
        return changed(self, layer=at, words=self.words.copy())

    def at(self, rows: IntArray | slice, **changes: np.ndarray | float) -> Wave:
        """A copy with the given columns changed in `rows`."""
        made = self.copy()
        made.put(rows, **changes)
        return made

    def put(self, rows: IntArray | slice, **changes: np.ndarray | float) -> None:
        """Write to columns in `rows` of a wave that nobody else has seen yet."""
        for name, value in changes.items():
            getattr(self, name)[rows] = value

    def take(self, rows: IntArray) -> Wave:
        """A wave of these rows alone, renumbered from 0, all alive."""
        sequences = tuple([self.sequences[row] for row in rows.tolist()])
        return changed(
            self, sequences=sequences, alive=np.arange(rows.size), words=self.words[rows]
        )

    def without(self, rows: IntArray) -> Wave:
        """The same wave with these rows no longer alive in it."""
        if not rows.size:
            return self
        gone = np.zeros(len(self.sequences), dtype=bool)
        gone[rows] = True
        return changed(self, alive=self.alive[~gone[self.alive]])

    def _column(self, name: str) -> Any:
        at = COLUMN[name]
        words = self.words if at >= len(FLOATS) else self.words.view(np.float64)
        return words[:, at]


def width_of(layer_count: int, server_count: int) -> int:
    """Words of one row."""
    return SCALARS + layer_count + server_count**2


def join_waves(waves: Sequence[Wave]) -> Wave:
    """One wave of all rows of waves that are at the same layer; all their rows are alive."""
    assert waves
    if len(waves) == 1:
        return waves[0]
    assert len({wave.layer for wave in waves}) == 1
    sequences = tuple(sequence for wave in waves for sequence in wave.sequences)
    words = np.concatenate([wave.words for wave in waves])
    return changed(waves[0], sequences=sequences, alive=np.arange(len(sequences)), words=words)
