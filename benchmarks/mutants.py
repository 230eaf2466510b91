"""How many small faults in the rules of decisions the quick tests notice.

    pip install cosmic-ray coverage
    python benchmarks/mutants.py --sample 150 --seed 1

Places in `cost/`, `policy/` and `engine/` where cosmic-ray's operators can change something are
drawn at random, one change at each: an operator, a number, a comparison, a condition, a loop. Each
runs in a process of its own, and in it the test files that enter the statement, quickest first,
until one fails. What numba would compile is interpreted, so that changes there count too. From a
checkout; neither tool is a dependency of anything else.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from random import Random
from typing import Any, NoReturn, TypeVar

import cosmic_ray.ast  # pyright: ignore[reportMissingImports]
import cosmic_ray.mutating  # pyright: ignore[reportMissingImports]
import cosmic_ray.plugins  # pyright: ignore[reportMissingImports]
import coverage  # pyright: ignore[reportMissingImports]
import pytest

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("cost", "policy", "engine")
TESTS = (
    "baselines", "clairvoyant", "complexity", "cost_model", "engine_books", "engine_drafts",
    "engine_rules", "exit_forecast", "exit_points", "exits_by_hand", "feedback", "guessed_budgets",
    "guesses", "letter", "letter_users", "lookahead", "lookahead_by_hand", "migrating_reference",
    "presets", "price", "segments", "skip_gates", "stand_in_action", "tables", "transmission_gate",
    "travelling", "utility", "values",
)  # fmt: skip
IMPORTED = ("numpy", "scipy.optimize", "numba", "pydantic", "torch", "yaml", "httpx", "hypothesis")
"""What takes long to import and is the same for all."""
LEFT_OUT = ("RemoveDecorator", "ExceptionReplacer")
"""Change nothing where nothing is compiled, or what no rule hangs on."""
MOST_S = 25
"""Processor time of a test file, while the lines that it enters are noted; longer ones are left
out."""
PATIENCE = 10.0
"""A change that makes tests run so many times longer than they do without has been noticed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where something can be changed, and the ways to."""

    path: Path
    line: int
    lines: range
    """Of the statement, or of what stands before its body."""
    ways: tuple[tuple[str, int], ...]
    """Operators and which of their occurrences in the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entered:
    """What a test file does to the code."""

    test: str
    seconds: float
    lines: dict[str, set[int]]
    """By file."""

    def enters(self, place: Place) -> bool:
        return not self.lines.get(str(place.path), set()).isdisjoint(place.lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sample", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="Part of the paths to change.")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="Files, as in tests/test_X.py.")
    given = parser.parse_args()
    prepare()
    places = all_places(given.only)
    found = (what_enters(name) for name in given.tests)
    entered = sorted(filter(None, found), key=lambda each: each.seconds)
    random = Random(given.seed)
    drawn = random.sample(places, min(given.sample, len(places)))
    print(f"{len(drawn)} of {len(places)} places, {len(entered)} test files", flush=True)
    counts: Counter[str] = Counter()
    for place in drawn:
        tests = [
            each for each in entered if each.lines.get(str(place.path), set()) & set(place.lines)
        ]
        verdict, shown = tried(place, random.choice(place.ways), tests)
        counts[verdict] += 1
        print(f"{verdict:9} {place.path.relative_to(ROOT)}:{place.line} {shown}", flush=True)
    noticed, lives = counts["dies"] + counts["hangs"], counts["lives"]
    print(f"{noticed} of {noticed + lives} noticed, {counts['unentered']} entered by no test here")


def prepare() -> None:
    """Import what is not to be changed, as tests would find it."""
    os.environ |= {"NUMBA_DISABLE_JIT": "1", "CI": "1", "OMP_NUM_THREADS": "1"}
    os.chdir(ROOT)
    sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
    sys.dont_write_bytecode = True
    for name in IMPORTED:
        importlib.import_module(name)


def all_places(only: str) -> list[Place]:
    """In the order of files and lines."""
    found: list[Place] = []
    for package in PACKAGES:
        folder = ROOT / "src/trimmoe" / package
        for path in sorted(path for path in folder.glob("*.py") if only in str(path)):
            ways = defaultdict(list)
            source = Source(path)
            for name, occurrence, position in changes(path):
                if source.evaluates(position):
                    ways[position].append((name, occurrence))
            found += [
                Place(
                    path=path,
                    line=position[0],
                    lines=source.statement(position[0]),
                    ways=tuple(each),
                )
                for position, each in sorted(ways.items())
            ]
    return found


def changes(path: Path) -> Iterator[tuple[str, int, tuple[int, int]]]:
    """Operator, occurrence and position of everything that could be changed in a file."""
    nodes = list(cosmic_ray.ast.ast_nodes(cosmic_ray.ast.get_ast_from_path(path)))
    for name in cosmic_ray.plugins.operator_names():
        operator = cosmic_ray.plugins.get_operator(name)
        if operator.arguments() or name.endswith(LEFT_OUT):
            continue
        positions = (begin for node in nodes for begin, _ in operator().mutation_positions(node))
        for occurrence, begin in enumerate(positions):
            yield name, occurrence, tuple(begin)


class Source:
    """What a file says where."""

    def __init__(self, path: Path) -> None:
        nodes = list(ast.walk(ast.parse(path.read_text())))
        # Nothing evaluates annotations.
        self._annotations = [
            (each.lineno, each.col_offset, each.end_lineno or 0, each.end_col_offset or 0)
            for node in nodes
            for each in (getattr(node, "annotation", None), getattr(node, "returns", None))
            if isinstance(each, ast.expr)
        ]
        # Parents come first, so that the innermost statement of a line stays.
        self._statement: dict[int, range] = {}
        for node in nodes:
            if isinstance(node, ast.stmt):
                body = getattr(node, "body", None)
                end = body[0].lineno - 1 if isinstance(body, list) else node.end_lineno or 0
                lines = range(node.lineno, max(end, node.lineno) + 1)
                self._statement |= dict.fromkeys(lines, lines)

    def evaluates(self, position: tuple[int, int]) -> bool:
        return not any(span[:2] <= position <= span[2:] for span in self._annotations)

    def statement(self, line: int) -> range:
        return self._statement.get(line, range(line, line + 1))


def what_enters(name: str) -> Entered | None:
    """The lines that a test file enters, and how long it takes; None: too long."""

    def run() -> tuple[int, float, dict[str, set[int]]]:
        resource.setrlimit(resource.RLIMIT_CPU, (MOST_S, MOST_S))
        seen = coverage.Coverage(data_file=None, include=[str(ROOT / "src/trimmoe/*")])
        seen.start()
        code = pytest.main(arguments(name))
        seen.stop()
        data = seen.get_data()
        files = data.measured_files()
        lines: dict[str, set[int]] = {path: set(data.lines(path) or ()) for path in files}
        return code, time.process_time(), lines

    found = in_child(run, limit_s=inf)
    if found is None:
        print(f"tests/test_{name}.py takes too long", flush=True)
        return None
    code, seconds, lines = found
    if code != 0:
        sys.exit(f"tests/test_{name}.py fails by itself; mend it first.")
    print(f"{seconds:5.1f} s tests/test_{name}.py", flush=True)
    return Entered(test=name, seconds=seconds, lines=lines)


def arguments(name: str) -> list[str]:
    # What schemathesis imports takes longer than most of the files.
    quiet = ["-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
    return [*quiet, "-W", "ignore::pytest.PytestAssertRewriteWarning", f"tests/test_{name}.py"]


def tried(place: Place, way: tuple[str, int], tests: list[Entered]) -> tuple[str, str]:
    """What became of one change, and the change."""
    before = place.path.read_text()
    operator = cosmic_ray.plugins.get_operator(way[0])()
    after = cosmic_ray.mutating.mutate_code(before, operator, way[1])
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm="")
    told = [line for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    shown = " ".join(" ".join(line.split()) for line in told)
    name = ".".join(place.path.relative_to(ROOT / "src").with_suffix("").parts)
    for each in tests:
        limit_s = 30 + round(PATIENCE * each.seconds)

        def run(test: str = each.test, limit_s: int = limit_s) -> int:
            resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s))
            return run_changed(name, place.path, after, test)

        # Of a machine that is busy otherwise a process may have little.
        code = in_child(run, limit_s=20.0 * limit_s)
        if code is None:
            return "hangs", f"{shown} | {each.test}"
        if code != 0:
            return "dies", f"{shown} | {each.test}"
    return ("lives" if tests else "unentered"), shown


def run_changed(name: str, path: Path, source: str, test: str) -> int:
    """Run a test file where the module `name` has another source."""

    class Loader(importlib.machinery.SourceFileLoader):
        def get_code(self, fullname: str) -> Any:
            return compile(source, str(path), "exec")

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, fullname: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
            if fullname != name:
                return None
            loader = Loader(name, str(path))
            return importlib.util.spec_from_file_location(name, path, loader=loader)

    sys.meta_path.insert(0, Finder())
    return pytest.main(arguments(test))


def in_child(run: Callable[[], T], limit_s: float) -> T | None:
    """What `run` gives in a process of its own, unheard; None: it took too long."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        child = os.fork()
        if child == 0:
            _answer(run, answer)
        until_s = time.monotonic() + limit_s
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > until_s:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return None
            time.sleep(0.02)
        if not answer.exists():
            return None
        given, error = pickle.loads(answer.read_bytes())
        if error:
            raise RuntimeError(error)
        return given


def _answer(run: Callable[[], Any], answer: Path) -> NoReturn:
    os.setsid()
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(quiet, stream)
    try:
        answer.write_bytes(pickle.dumps((run(), "")))
    except BaseException:
        answer.write_bytes(pickle.dumps((None, traceback.format_exc())))
    os._exit(0)


if __name__ == "__main__":
    main()
