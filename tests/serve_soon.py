"""`trimmoe` as it is, but sooner taking a silent head for gone: tests wait for that; and, where
`FULL` is set, as if no machine had memory for two plans at once."""

from __future__ import annotations

import os

import numpy as np

from trimmoe import cli
from trimmoe.experiments import joining
from trimmoe.experiments.chaos import failures
from trimmoe.runtime.launch import join, member

FULL = "TRIMMOE_TEST_FULL"

if __name__ == "__main__":
    member._AWAY_S = join.ALONE_S = failures.CUT_S = 2.0
    if FULL in os.environ:
        joining.too_large_beside = lambda needed, free, machine: np.unique(machine)
    cli.main()
