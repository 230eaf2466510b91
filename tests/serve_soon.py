"""`trimmoe` as it is, but sooner taking a silent head for gone: tests wait for that."""

from __future__ import annotations

from trimmoe import cli
from trimmoe.experiments.chaos import failures
from trimmoe.runtime.launch import join, member

if __name__ == "__main__":
    member._AWAY_S = join.ALONE_S = failures.CUT_S = 2.0
    cli.main()
