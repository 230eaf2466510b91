"""Compiled functions that are compiled once, and while something else is done."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimmoe.models.compiled import apart, aside

CALLED_TOO_EARLY = """
import numpy as np
from trimmoe.models.compiled import calls
x = np.zeros((1, 32), dtype=np.float32)
calls.norm(x, x.ctypes.data, 32, 1e-5, x)
print("went on")
"""


THREADS = """
import torch
from trimmoe.models.compiled import calls
torch.set_num_threads(1)
assert torch.get_num_threads() == 1
calls.prepare_all()
print(torch.get_num_threads())
"""


def test_what_torch_computes_with_stays_as_it_was() -> None:
    """Four servers on two cores would wait for each other's threads while they open a model."""
    ran = subprocess.run(
        [sys.executable, "-c", THREADS],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"NUMBA_NUM_THREADS": "2"},
    )
    assert int(ran.stdout) == 1


def test_what_was_not_prepared_ends_the_process_with_a_sentence() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CALLED_TOO_EARLY], capture_output=True, text=True, check=False
    )
    assert ran.returncode != 0
    assert "called before it was prepared" in ran.stderr
    assert "went on" not in ran.stdout


def test_what_is_prepared_twice_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from trimmoe.models.compiled import calls

    calls.prepare_all()
    monkeypatch.setattr(apart, "cfunc", None)
    calls.prepare_all()
    x = np.full((1, 32), 2.0, dtype=np.float32)
    weight, out = np.ones(32, dtype=np.float32), np.empty_like(x)
    calls.norm(x, weight.ctypes.data, 32, 0.0, out)
    assert np.allclose(out, 1.0)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_another_process_compiles_where_nobody_has(
    is_compiled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[Any] = []
    monkeypatch.setattr(aside, "__file__", str(tmp_path / "aside.py"))
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: began.append(command))
    (tmp_path / "__pycache__").mkdir()
    if is_compiled:
        (tmp_path / "__pycache__" / "step.segment-1.py311.nbi").touch()
    aside.compile_aside()
    assert bool(began) is not is_compiled
