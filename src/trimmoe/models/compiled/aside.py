"""Compiling for the first time while something else is done."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def compile_aside() -> None:
    """Have another process compile what models on processors compute with, if nobody has yet.

    Whoever opens a model meanwhile waits for it.
    """
    kept = Path(__file__).parent / "__pycache__"
    if any(kept.glob("step.*.nbi")):
        return
    command = [sys.executable, "-m", __name__]
    quiet = subprocess.DEVNULL
    subprocess.Popen(command, stdin=quiet, stdout=quiet, stderr=quiet)


if __name__ == "__main__":
    from trimmoe.models.compiled.calls import prepare_all

    prepare_all()
