"""The cluster files that come with the package, which go by their names wherever a file is asked
for."""

from __future__ import annotations

import re
from itertools import takewhile
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "clusters"


def sample_names() -> tuple[str, ...]:
    """Names of all sample clusters, in alphabetical order."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.yaml")))


def sample_path(name: str) -> Path:
    """The file of the sample called `name`, one of `sample_names`."""
    return FOLDER / f"{name}.yaml"


def cluster_path(given: Path) -> Path:
    """The file meant by what a user gave: that file, or the sample of that name if there is none,
    `local4` or `local4.yaml`.

    Whether the file exists is left to whoever reads it.
    """
    name = str(given).removesuffix(".yaml")
    named = len(given.parts) == 1 and name in sample_names()
    return sample_path(name) if named and not given.is_file() else given


def sample_summary(name: str) -> str:
    """What the file says about itself first: the first sentence of its opening comment."""
    lines = sample_path(name).read_text(encoding="utf-8").splitlines()
    comment = " ".join(line[1:].strip() for line in takewhile(_is_comment, lines))
    return re.split(r"(?<=\.)\s", comment, maxsplit=1)[0]


def _is_comment(line: str) -> bool:
    return line.startswith("#") and len(line) > 1
