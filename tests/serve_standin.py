"""`trimmoe serve` with a stand-in for nodes: `python serve_standin.py FACTORY key=value ...`."""

from __future__ import annotations

import sys
from dataclasses import replace

from standin import FACTORIES
from trimmoe.core.errors import UserError
from trimmoe.experiments.serve_cluster import pieces_of, serve_here
from trimmoe.runtime.launch import processes
from trimmoe.runtime.launch.config import serve_config


def main() -> int:
    processes._CALM_S = 1.0  # Tests wait for a spare.
    name, *pairs = sys.argv[1:]
    config = serve_config(None, dict(pair.split("=", 1) for pair in pairs))
    try:
        serve_here(config, print, pieces=replace(pieces_of(config), node=FACTORIES[name]))
    except UserError as error:
        print(f"trimmoe: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
