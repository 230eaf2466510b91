"""English prose for trying things out, without a download: Python's own language reference.

Every CPython carries the chapters that `help()` shows (PSF licence). Code and tables are left out;
chapters are split in two disjoint parts, so that what is held out was never calibrated on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from trimmoe.core.artifact import written_whole

_HELD_OUT_EVERY = 4


def sample_text(part: Literal["calibration", "held-out"]) -> str:
    """The prose paragraphs of one part, in a fixed order."""
    from pydoc_data.topics import topics

    chapters = [topics[name] for name in sorted(topics)]
    wanted = [
        chapter
        for number, chapter in enumerate(chapters)
        if (number % _HELD_OUT_EVERY == 0) == (part == "held-out")
    ]
    seen: dict[str, None] = {}
    for chapter in wanted:
        for paragraph in chapter.split("\n\n"):
            if _is_prose(paragraph):
                # Some chapters repeat others' paragraphs; each counts once.
                seen.setdefault(" ".join(paragraph.split()))
    if part == "held-out":
        known = set(sample_text("calibration").split("\n\n"))
        return "\n\n".join(paragraph for paragraph in seen if paragraph not in known)
    return "\n\n".join(seen)


def _is_prose(paragraph: str) -> bool:
    """Whether a paragraph is sentences rather than code, grammar or a table."""
    lines = paragraph.splitlines()
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    return (
        len(lines) >= 2
        and not any(line.startswith((" ", "*", "|", "+")) for line in lines)
        and ". " in paragraph + " "
        and letters > 0.85 * len(paragraph)
    )


def write_sample_text(path: Path, part: Literal["calibration", "held-out"]) -> None:
    """Write one part to `path`, atomically."""
    with written_whole(path) as temporary:
        temporary.write_text(sample_text(part) + "\n", encoding="utf-8")
