"""What is compiled is forgotten when a file that went into it changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from trimmoe.core.compiled_from import forget_outdated

INLINED = """
from numba import njit

ADDED = {added}

@njit(cache=True)
def add(number):
    return number + ADDED
"""
CALLING = """
from pathlib import Path

from numba import njit

from trimmoe.core.compiled_from import forget_outdated

forget_outdated(Path(__file__).parent, Path(__file__).parent)

from inlined import add

@njit(cache=True)
def twice(number):
    return 2 * add(number)

print(twice(1), sum(twice.stats.cache_hits.values()))
"""


def test_what_was_compiled_from_other_sources_is_forgotten(tmp_path: Path) -> None:
    cache = tmp_path / "__pycache__"
    cache.mkdir()
    old, sources = cache / "step.nbi", [tmp_path / name for name in ("step.py", "lanes.py")]
    sources[0].write_text("a = 1")
    sources[1].write_text("b = 1")
    forget_outdated(tmp_path, *sources)
    old.touch()
    forget_outdated(tmp_path, *sources)
    assert old.exists()
    (tmp_path / "view.py").write_text("b = 2")
    forget_outdated(tmp_path, *sources)
    assert old.exists()
    sources[1].write_text("b = 2")
    forget_outdated(tmp_path, *sources)
    assert not old.exists()


@pytest.mark.slow
def test_a_function_is_compiled_anew_when_what_it_calls_in_another_file_changes(
    tmp_path: Path,
) -> None:
    (tmp_path / "calling.py").write_text(CALLING)
    said = []
    for added in (1, 1, 50):  # Of another size, as Python tells files of one second by it.
        (tmp_path / "inlined.py").write_text(INLINED.format(added=added))
        run = [sys.executable, "calling.py"]
        said += [subprocess.run(run, cwd=tmp_path, capture_output=True, check=True, text=True)]
    assert [one.stdout.split() for one in said] == [["4", "0"], ["4", "1"], ["102", "0"]]
