"""The picture in docs/architecture.md of who makes and who reads what is handed on.

    python tools/data_picture.py

Packages are in the order of their imports; nouns are classes of `core/`. Whoever calls a class, or
a method of it, makes one; whoever imports it reads it. A test says when the picture is out of date.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import networkx

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

from house import PACKAGE, imports, module_of, package  # noqa: E402

PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- made by tools/data_picture.py -->\n```text\n", "```\n"
NOUNS = "ClusterSpec", "ModelSpec", "Profile", "Trace", "Machines", "Plan", "Wave", "Ledger"
MADE, READ = "makes", "reads"


def main() -> None:
    before, _, after = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, rest = after.partition(END)
    PAGE.write_text(before + BEGIN + picture() + END + rest, encoding="utf-8")


def picture() -> str:
    """A line per package that makes or reads any of the nouns."""
    does, edges = _found()
    widths = [max(map(len, does)), *map(len, NOUNS)]
    lines = [_line(("", *NOUNS), widths)]
    for name in networkx.lexicographical_topological_sort(networkx.DiGraph(edges)):
        if does[name]:
            cells = (name, *(does[name].get(noun, "") for noun in NOUNS))
            lines.append(_line(cells, widths))
    return "".join(lines)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
    return "  ".join(padded).rstrip() + "\n"


def _found() -> tuple[dict[str, dict[str, str]], set[tuple[str, str]]]:
    """What packages do with nouns, and which of them imports which, the imported one first."""
    trees = {module_of(path, PACKAGE): path for path in PACKAGE.rglob("*.py")}
    does: dict[str, dict[str, str]] = defaultdict(dict)
    edges: set[tuple[str, str]] = set()
    for name, path in trees.items():
        if name == PACKAGE.name:
            continue
        tree, own = ast.parse(path.read_text(encoding="utf-8")), package(name).partition(".")[2]
        for each in imports(tree, name, set(trees)):
            other = package(each.module).partition(".")[2]
            if other and other != own:
                edges.add((other, own))
            if each.name in NOUNS and other == "core":
                does[own].setdefault(each.name, READ)
        for noun in _called(tree):
            if noun in NOUNS:
                does[own][noun] = MADE
    return does, edges


def _called(tree: ast.Module) -> set[str]:
    """Classes of `core/` that a module makes one of."""
    local = {
        each.asname or each.name: each.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("trimmoe.core.")
        for each in node.names
    }
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    owners = (func.value if isinstance(func, ast.Attribute) else func for func in called)
    return {local[each.id] for each in owners if isinstance(each, ast.Name) and each.id in local}


if __name__ == "__main__":
    main()
