"""The tables in docs/architecture.md of how the paper is read, and of what else `paper` sets.

    python tools/readings_table.py

A test says when they are out of date.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

from trimmoe.policy.presets import paper, trimmoe
from trimmoe.policy.readings import Readings

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
BEGIN, END = "<!-- made by tools/readings_table.py -->\n", "<!-- to here -->\n"


def main() -> None:
    before, _, after = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, rest = after.partition(END)
    PAGE.write_text(before + BEGIN + table() + END + rest, encoding="utf-8")


def table() -> str:
    """A line per reading, and one per other option that the preset sets; those of levers too."""
    rest = replace(paper(), readings=Readings())
    return (
        _differing("reading", "ours", "the letter", Readings(), Readings.letter())
        + _differing("other option", "`trimmoe`", "`paper`", trimmoe(), rest)
        + "\n"
    )


def _differing(what: str, one: str, other: str, ours: Any, theirs: Any) -> str:
    here, there = _options(ours), _options(theirs)
    rows = [(name, here[name], there[name]) for name in here if here[name] != there[name]]
    head = f"\n| {what} | {one} | {other} |\n|---|---|---|\n"
    return head + "".join(f"| `{name}` | {a} | {b} |\n" for name, a, b in rows)


def _options(settings: Any, within: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for each in fields(settings):
        value, name = getattr(settings, each.name), within + each.name
        if is_dataclass(value):
            found |= _options(value, f"{name}.")
        elif each.name != "name":
            found[name] = str(value.value if isinstance(value, Enum) else value)
    return found


if __name__ == "__main__":
    main()
