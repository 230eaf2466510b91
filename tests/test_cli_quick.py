"""What answers at once imports nothing heavy; seconds are never asserted, modules are."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files

import pytest

import trimmoe

HEAVY = ("torch", "transformers", "numpy", "numba", "scipy", "ray", "fastapi", "matplotlib")
SHOW = f"import sys; print([name for name in {HEAVY!r} if name in sys.modules])"


def imported(code: str) -> str:
    """Which heavy modules are there after `code`, run by a fresh interpreter."""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()[-1]


def test_the_package_imports_nothing_heavy() -> None:
    assert imported(f"import trimmoe\n{SHOW}") == "[]"


@pytest.mark.parametrize("command", [[], ["serve"], ["plan"], ["bench", "serve"], ["experiment"]])
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    code = f"""
import sys
from trimmoe import cli
sys.argv = ["trimmoe", *{command!r}, "--help"]
try:
    cli.main()
except SystemExit as left:
    assert not left.code
{SHOW}
"""
    assert imported(code) == "[]"


def test_servers_start_without_what_only_planners_need() -> None:
    """Every server of a cluster would take these tenths of a second."""
    code = "import sys, trimmoe.runtime.launch.nodes; print('scipy.optimize' in sys.modules)"
    assert imported(code) == "False"


def test_who_starts_servers_draws_nothing() -> None:
    code = "import sys, trimmoe.experiments.self_measuring; print('matplotlib' in sys.modules)"
    assert imported(code) == "False"


def test_what_a_model_is_takes_none_of_its_classes() -> None:
    code = """
import sys
from trimmoe.models.load import family_of
family_of("qwen2_moe").config({"model_type": "qwen2_moe"})
print([name for name in sys.modules if name.startswith("transformers.models.qwen2_moe.modeling")])
"""
    assert imported(code) == "[]"


def test_types_are_told_to_checkers() -> None:
    assert (files("trimmoe") / "py.typed").is_file()


def test_the_version_is_told_without_anything_heavy() -> None:
    code = f"""
import sys
from trimmoe import cli
sys.argv = ["trimmoe", "--version"]
try:
    cli.main()
except SystemExit as left:
    assert not left.code
{SHOW}
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [f"trimmoe {trimmoe.__version__}", "[]"]
