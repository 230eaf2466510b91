"""English prose for trying things out, without a download: what every Python says about itself.

The chapters that `help()` shows and the documentation strings of the standard library's modules
(PSF licence). Code and tables are left out; chapters and modules are split in two disjoint parts,
so that what is held out was never calibrated on.
"""

from __future__ import annotations

import ast
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Literal, TypeVar

from trimmoe.core.artifact import written_whole

Part = Literal["calibration", "held-out"]
_HELD_OUT_EVERY = 4
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")
"""Where statements have others, in the order of their fields."""
Source = TypeVar("Source", str, Path)


def sample_text(part: Part) -> str:
    """The prose paragraphs of one part, in a fixed order; some 70,000 tokens to calibrate on."""
    if part == "calibration":
        return "\n\n".join(_paragraphs(part))
    known = set(_paragraphs("calibration"))
    return "\n\n".join(paragraph for paragraph in _paragraphs(part) if paragraph not in known)


@cache
def _paragraphs(part: Part) -> tuple[str, ...]:
    """One part's paragraphs, lines joined; some chapters repeat others', each counts once.

    Kept, for parsing the whole library takes seconds.
    """
    texts = [*_split(_chapters(), part), *map(_documentation, _split(_modules(), part))]
    found = (paragraph for text in texts for paragraph in text.split("\n\n"))
    return tuple(dict.fromkeys(" ".join(p.split()) for p in found if _is_prose(p)))


def _split(sources: Iterable[Source], part: Part) -> Iterator[Source]:
    for number, source in enumerate(sources):
        if (number % _HELD_OUT_EVERY == 0) == (part == "held-out"):
            yield source


def _chapters() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]


def _modules() -> list[Path]:
    """Each that is a file of its own."""
    return sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))


@cache
def _documentation(module: Path) -> str:
    """All documentation strings of a module, which is not imported."""
    tree = ast.parse(module.read_text(encoding="utf-8"))
    documented = (node for node in _walk(tree) if isinstance(node, _DOCUMENTED))
    return "\n\n".join(filter(None, map(ast.get_docstring, documented)))


def _walk(tree: ast.Module) -> Iterator[ast.AST]:
    """As `ast.walk`, in its order, but for expressions: nothing in them has documentation."""
    ahead: deque[ast.AST] = deque([tree])
    while ahead:
        node = ahead.popleft()
        ahead.extend(child for name in _BLOCKS for child in getattr(node, name, ()))
        yield node


def _is_prose(paragraph: str) -> bool:
    """Whether a paragraph is sentences rather than code, grammar or a table."""
    lines = paragraph.splitlines()
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return (
        len(lines) >= 2
        and not any(line.startswith((" ", "*", "|", "+", ">")) for line in lines)
        and ". " in paragraph + " "
        and letters > 0.85 * len(paragraph)
    )


def sample_file(part: Part) -> str:
    """What a file of one part says."""
    return sample_text(part) + "\n"


def write_sample_text(path: Path, part: Part) -> None:
    """Write one part to `path`, atomically."""
    with written_whole(path) as temporary:
        temporary.write_text(sample_file(part), encoding="utf-8")
