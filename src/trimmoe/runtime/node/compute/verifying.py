"""Which results of experts elsewhere are computed a second time, and by whom.

What a server gives is the same whoever runs it, but for rounding (`models.sums`), so that two that
differ cannot both be right. Who is asked first cannot tell that somebody else is asked too.
"""

from __future__ import annotations

import numpy as np

from trimmoe.core.specs import BoolArray, IntArray
from trimmoe.runtime.node.compute.shipping import Cargo, Split

PANEL = 2
"""Strangers that are asked a second time, so that of three who differ in one that one is known."""


class Verifier:
    """Of one server; `hosts` [M, N, E] are those that may be asked, and `knows` [M] says who knows
    what being asked a second time is (`wire.protocol.VERIFIES_SINCE`)."""

    def __init__(self, share: float, hosts: BoolArray, knows: BoolArray) -> None:
        self.share, self.hosts, self.knows = share, hosts, knows
        # Without a seed: nobody shall know ahead what is checked.
        self._rng = np.random.default_rng()

    @staticmethod
    def idle() -> Verifier:
        """Checks nothing."""
        return Verifier(0.0, np.zeros((0, 0, 0), dtype=bool), np.zeros(0, dtype=bool))

    def choose(self, cargo: Cargo, split: Split, leaving: IntArray) -> None:
        """Note in the cargo which results of the rows `leaving` are checked, and by whom."""
        if not self.share:
            return
        for row in leaving.tolist():
            destination = int(split.destination[row])
            if not self.knows[destination]:
                continue
            first = split.used[row].copy()
            # Whoever gathers would be asked about itself.
            first[[split.here, destination]] = False
            for server in np.flatnonzero(first).tolist():
                if self._rng.random() < self.share:
                    panel = self._panel(cargo.layer, split, row, server)
                    if panel:
                        cargo.checks.setdefault(row, []).extend((server, one) for one in panel)

    def _panel(self, layer: int, split: Split, row: int, server: int) -> list[int]:
        experts = split.slot_expert[row][split.slot_server[row] == server]
        able = self.hosts[:, layer, experts[experts >= 0]].all(1) & self.knows
        able[server] = False
        for own in (split.here, int(split.destination[row])):
            if able[own]:
                return [own]
        others = np.flatnonzero(able)
        return self._rng.permutation(others)[:PANEL].tolist()
