"""Compiling once, before many processes would each do it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from launching import write_files


def test_servers_find_everything_compiled_that_they_decide_with(tmp_path: Path) -> None:
    files = write_files(tmp_path)
    here = Path(__file__).parent
    command = [sys.executable, str(here / "compiled_signatures.py")]
    made = subprocess.run(
        [*command, str(files.model), str(files.profile), str(files.plan)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(here), "OMP_NUM_THREADS": "1"},
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.strip() == ""
