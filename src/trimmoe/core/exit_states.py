"""What an exited token leaves for later ones, and the bounds of what exits flip."""

from __future__ import annotations

from enum import StrEnum

import numpy as np

from trimmoe.core.specs import FloatArray


class ExitState(StrEnum):
    """What later tokens find of one that exited, in the layers that it did not run."""

    WHOLE = "whole"
    """What they always find: it goes on through all of them, off the critical path, and only its
    prediction was early. At full depth it says whether that was right."""
    DENSE = "dense"
    """Its attention and shared experts go on, off the critical path; routed experts do not."""
    FROZEN = "frozen"
    """Its state stands still; the layers' keys and values are made from it, as in the paper."""


ECHOING_STATES = (ExitState.DENSE, ExitState.FROZEN)
"""Those in which an exit may flip later predictions."""


def exit_bound(error_upper: FloatArray, echo: FloatArray, state: ExitState) -> FloatArray:
    """All that one exit flips at each p [T], where it errs by at most `error_upper` [T] and flips
    `echo` later tokens, by `ECHOING_STATES`."""
    if state is ExitState.WHOLE:
        return error_upper
    return error_upper + echo[ECHOING_STATES.index(state)]


def exit_threshold(grid: FloatArray, error_upper: FloatArray, tolerated_error: float) -> float:
    """The least grid p at which, and above which, the exit error's bound is tolerated.

    Learn-then-Test with a fixed sequence: from the strictest p downwards, stop at the first
    rejection. Above 1, so that nothing exits, if even the strictest p fails.
    """
    failing = np.flatnonzero(error_upper > tolerated_error)
    if failing.size == 0:
        return float(grid[0])
    first_good = int(failing[-1]) + 1
    return float(grid[first_good]) if first_good < grid.size else np.inf
