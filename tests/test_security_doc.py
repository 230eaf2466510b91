"""The threat model names a test for every line, and there are such tests."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
DOCUMENT = TESTS.parent / "docs" / "security.md"
_NAMED = re.compile(r"`(test_\w+\.py)::(test_\w+)`")


def test_every_line_of_the_threat_model_names_tests_that_exist() -> None:
    lines = [line for line in DOCUMENT.read_text().splitlines() if line.startswith("| can")]
    assert len(lines) > 30
    assert all(_NAMED.search(line.rsplit("|", 2)[1]) for line in lines)


def test_what_it_names_is_there() -> None:
    named = set(_NAMED.findall(DOCUMENT.read_text()))
    assert named
    missing = {(file, name) for file, name in named if name not in _tests_in(TESTS / file)}
    assert not missing


def _tests_in(file: Path) -> set[str]:
    tree = ast.parse(file.read_text()) if file.is_file() else ast.Module([], [])
    return {
        node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
