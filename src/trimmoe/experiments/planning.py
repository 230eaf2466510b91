"""Planning against the clock: what the planner itself may not look at."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ClusterSpec, ModelSpec
from trimmoe.placement.make import PlanSettings
from trimmoe.placement.optimise import SearchSettings, optimise_plan
from trimmoe.progress import track

_TICKS = 100
_SECONDS = 60.0
_BOUND_SHARE = 0.25
"""Of the time, for the integer program where the cluster is small enough for it."""


class Countdown:
    """Answers whether there is time left, and moves a bar along if it has a label; use as a
    context manager."""

    def __init__(
        self, seconds: float, label: str | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert seconds > 0
        self._seconds, self._clock = seconds, clock
        self._bar: Iterator[int] = iter(()) if label is None else track(range(_TICKS), label)
        self._ticks = 0

    def __enter__(self) -> Countdown:
        self._start = self._clock()
        return self

    def __exit__(self, *_: object) -> None:
        for _tick in self._bar:  # to the end, where the bar disappears
            pass

    def keep_going(self, share: float = 1.0) -> bool:
        """Whether less than `share` of the time has passed."""
        passed = (self._clock() - self._start) / self._seconds
        while self._ticks < min(passed, 1.0) * _TICKS:
            next(self._bar, None)
            self._ticks += 1
        return passed < share


def search_settings(given: Mapping[str, Any], *, seconds: float | None) -> SearchSettings:
    """The search a user asked for by `given` fields of `SearchSettings`.

    Where no number of iterations is given only the time ends it. Where only iterations are, they
    end it, and nothing depends on the speed of the machine.
    """
    if "iterations" not in given:
        endless = sys.maxsize
        bound_seconds = _BOUND_SHARE * (_SECONDS if seconds is None else seconds)
        settings = SearchSettings(
            iterations=endless, trimmed_iterations=endless, bound_seconds=bound_seconds
        )
    else:
        settings = SearchSettings()
    return replace(settings, **given)


def optimise_for(
    seconds: float | None,
    profile: Profile,
    model: ModelSpec,
    cluster: ClusterSpec,
    search: SearchSettings,
    settings: PlanSettings | None = None,
    *,
    cluster_hash: str,
) -> Plan:
    """`optimise_plan` for about `seconds`, or less if the iterations end it; shows a bar.

    None is a minute, or without end where `search` has a number of iterations.

    What the integer program may take (`search.bound_seconds`) comes on top.
    """
    if seconds is None:
        seconds = _SECONDS if search.iterations == sys.maxsize else float("inf")
    with Countdown(seconds, "Searching for a plan") as countdown:
        return optimise_plan(
            profile,
            model,
            cluster,
            search,
            settings,
            cluster_hash=cluster_hash,
            keep_going=countdown.keep_going,
        )
