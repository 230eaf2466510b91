"""`trimmoe` in another network, see `Lan`: `python -m trimmoe.cli.inside PATH COMMAND ...`."""

from __future__ import annotations

import sys

from trimmoe.cli import main
from trimmoe.experiments.chaos.lan import enter

if __name__ == "__main__":
    enter(sys.argv.pop(1))
    main()
