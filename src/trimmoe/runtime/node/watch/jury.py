"""Servers that gave wrong results are left out, as if they were lost, until this one restarts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from trimmoe.core.specs import BoolArray
from trimmoe.placement.live import live_hosts
from trimmoe.runtime.node.records.units import Check, Part, Unit
from trimmoe.runtime.node.records.verdict import judged

_log = logging.getLogger(__name__)


class Jury:
    """Of one server. `hosts` [M, N, E] are the plan's; `lost` says who is lost anyway, `leave_out`
    is told of each server that is left out from now on, and `undecided` of units whose right states
    nobody knows. By `rounding` honest results may differ (`verdict.rounding_of`)."""

    def __init__(
        self,
        names: Sequence[str],
        hosts: BoolArray,
        *,
        rounding: float,
        server: int,
        lost: Callable[[], frozenset[int]],
        leave_out: Callable[[int], None],
        undecided: Callable[[Unit], None],
    ) -> None:
        self._names, self._hosts, self._server = names, hosts, server
        self._rounding = rounding
        self._lost, self._leave_out, self._undecided = lost, leave_out, undecided
        self.left_out: set[int] = set()
        self._told: set[frozenset[int]] = set()
        """Suspects that cannot be spared, of whom it was said."""
        self.verified = self.wrong = 0
        """Results so far."""

    def judge(
        self, unit: Unit, parts: Mapping[int, Part], seconds: Mapping[Check, Part]
    ) -> dict[int, Part] | None:
        """As `records.units.Judge`: the word of this server, and of the one that the rows come
        from, decides."""
        trusted = {self._server, unit.seat.route[unit.layer]}
        right, verdict = judged(parts, seconds, trusted, unit.count, self._rounding)
        self.verified += verdict.checked
        self.wrong += bool(verdict.liars or verdict.suspects)
        for liar in sorted(verdict.liars):
            self._out(liar, "%s gave wrong results of its experts and is left out.")
        if not verdict.is_open:
            return right
        self._suspected(frozenset(verdict.suspects))
        self._undecided(unit)
        return None

    def _suspected(self, suspects: frozenset[int]) -> None:
        named = " and ".join(self._names[one] for one in sorted(suspects))
        without = self._lost() | suspects
        if not live_hosts(self._hosts, without).any(axis=0).all():
            if suspects in self._told:
                return
            self._told.add(suspects)
            _log.error(
                "%s gave different results of the same experts; without them some experts have no "
                "server, so they are still asked, and answers that they differ in end with an "
                "error. Look after them.",
                named,
            )
            return
        for suspect in sorted(suspects):
            self._out(suspect, f"%s is left out: {named} gave different results.")

    def _out(self, server: int, why: str) -> None:
        if server not in self.left_out and server != self._server:
            self.left_out.add(server)
            _log.error(why, self._names[server])
            self._leave_out(server)
