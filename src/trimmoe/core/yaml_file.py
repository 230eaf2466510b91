"""YAML files of users, read without trust: whatever is in them, reading is quick or refused."""

from __future__ import annotations

import reprlib
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml
from yaml.scanner import ScannerError

from trimmoe.core.errors import UserError

LARGEST_BYTES = 1 << 20
"""Files that people write are shorter; it takes seconds to read as much."""
_AMISS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What PyYAML raises beside its own errors for what it cannot make values of."""
_DEEPEST = 32
"""Of brackets."""


class _Loader(yaml.SafeLoader):
    """Refuses a key given twice, of which plain YAML loading silently keeps the last, and brackets
    in brackets in brackets, for which it takes the square of their number in time."""

    def fetch_flow_collection_start(self, TokenClass: type[yaml.Token]) -> None:
        if self.flow_level >= _DEEPEST:
            raise ScannerError(None, None, "brackets are nested too deeply", self.get_mark())
        super().fetch_flow_collection_start(TokenClass)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        seen: set[Hashable] = set()
        for index, key in enumerate(keys):
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key!r} is given twice", node.value[index][0].start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, what: str) -> Any:
    """The content of a UTF-8 file, `what` it is for the error. Raises `FileNotFoundError`, and
    `UserError` that names the line that is wrong."""
    try:
        with path.open("rb") as opened:
            content = opened.read(LARGEST_BYTES + 1)
        text = content.decode("utf-8")
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"Cannot read the {what} in {path} ({error}); give a readable UTF-8 text file."
        ) from error
    if len(content) > LARGEST_BYTES:
        raise UserError(f"{path} is longer than a {what} may be (1 MB); give the right file.")
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, *_AMISS) as error:
        where = getattr(error, "problem_mark", None)
        place = f"line {where.line + 1}" if where else "the file"
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise UserError(
            f"{path}: {place} is not valid YAML ({problem[:200]}); mend it there."
        ) from error


def shown(value: Any) -> str:
    """A value of such a file for a sentence, however long it is: aliases may make it endless."""
    try:
        return _short.repr(value)
    except ValueError:  # Python writes no numbers of thousands of digits.
        return f"a {type(value).__name__} of too many digits"


_short = reprlib.Repr()
_short.maxlevel, _short.maxlist, _short.maxdict, _short.maxstring = 2, 3, 3, 60
