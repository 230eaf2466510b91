"""How large a package is, what goes round in it, what others may use, how long functions are.

    python benchmarks/house.py [src/trimmoe]

Nothing is imported: files are only parsed. Circles are looked for between modules, and between
modules and packages that lie side by side; by what is imported at the top of files, then also
within functions, then also for types. The package itself, which everybody asks for its version and
which offers everything, is left out of them.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import NamedTuple

import networkx

PACKAGE = Path(__file__).parents[1] / "src" / "trimmoe"
LONG, SHORT = 300, 60
"""Lines that a long file has more than, and a short one less."""
PLACES = "top", "inside", "types"
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


class Import(NamedTuple):
    """What a module takes from where, and at which of `PLACES`."""

    by: str
    module: str
    name: str
    """Of what is taken; empty where it is the module."""
    place: str


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", type=Path, nargs="?", default=PACKAGE)
    folder: Path = parser.parse_args().package
    texts = {module_of(each, folder): each.read_text("utf-8") for each in folder.rglob("*.py")}
    trees = {name: ast.parse(text) for name, text in sorted(texts.items())}
    lines = {name: len(text.splitlines()) for name, text in texts.items()}
    print(f"files {len(lines)}, lines {sum(lines.values())}, median {median(lines.values()):.0f}")
    print(f"files under {SHORT} lines: {sum(each < SHORT for each in lines.values())}")
    print(f"files over {LONG} lines: {sum(each > LONG for each in lines.values())}")
    _longest({name: size for name, size in lines.items() if size > LONG})
    lengths = {
        f"{name}:{node.name}": (node.end_lineno or node.lineno) - node.lineno + 1
        for name, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, FUNCTIONS)
    }
    print(f"functions {len(lengths)}, median {median(lengths.values()):.0f} lines, longest:")
    _longest(lengths, 5)
    found = [each for name, tree in trees.items() for each in imports(tree, name, set(trees))]
    for places in accumulate(PLACES, lambda before, place: f"{before} {place}"):
        edges = [
            (each.by, each.module)
            for each in found
            if each.place in places.split() and folder.name not in (each.by, each.module)
        ]
        for kind, round_ in (("modules", circles(edges)), ("neighbours", circles(siblings(edges)))):
            print(f"circles of {kind}, imports {places}: {len(round_)}")
            for circle in round_:
                print(f"  {' '.join(circle)}")
    print("names without an underscore by package, and how many others take of them:")
    defined = Counter(package(name) for name, tree in trees.items() for _ in public(tree))
    taken = {(each.module, each.name) for each in found if package(each.by) != package(each.module)}
    by_others = Counter(package(module) for module, name in taken if name)
    for name in sorted(defined):
        print(f"  {defined[name]:4} {by_others[name]:4} {name}")


def module_of(path: Path, folder: Path) -> str:
    """The name that a file is imported by."""
    parts = path.relative_to(folder.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package(module: str) -> str:
    return ".".join(module.split(".")[:2])


def imports(tree: ast.Module, name: str, known: set[str]) -> Iterator[Import]:
    """What a module takes from modules that are known."""

    def within(node: ast.AST, place: str) -> Iterator[Import]:
        if isinstance(node, FUNCTIONS):
            place = "inside"
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            place = "types"
        if isinstance(node, ast.Import):
            yield from (Import(name, each.name, "", place) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports what is named relative to it"
            for each in node.names:
                module = f"{node.module}.{each.name}"
                if module in known:
                    yield Import(name, module, "", place)
                else:
                    yield Import(name, node.module or "", each.name, place)
        for child in ast.iter_child_nodes(node):
            yield from within(child, place)

    return (each for each in within(tree, "top") if each.module in known)


def circles(edges: Iterable[tuple[str, str]]) -> list[list[str]]:
    """What can be reached from one another, two or more."""
    groups = networkx.strongly_connected_components(networkx.DiGraph(edges))
    return sorted(sorted(group) for group in groups if len(group) > 1)


def siblings(edges: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Instead of modules what they are part of, just below the package that both are in."""
    for one, other in edges:
        pairs = zip(
            accumulate(one.split("."), _dot), accumulate(other.split("."), _dot), strict=False
        )
        yield next(((mine, its) for mine, its in pairs if mine != its), (one, other))


def _dot(before: str, part: str) -> str:
    return f"{before}.{part}"


def public(tree: ast.Module) -> set[str]:
    """Names that a module defines, without an underscore."""
    named = {node.name for node in tree.body if isinstance(node, FUNCTIONS | ast.ClassDef)}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named |= {each.id for each in targets if isinstance(each, ast.Name)}
    return {name for name in named if not name.startswith("_")}


def _longest(sizes: dict[str, int], most: int | None = None) -> None:
    for name in sorted(sizes, key=lambda each: -sizes[each])[:most]:
        print(f"  {sizes[name]} {name}")


if __name__ == "__main__":
    main()
