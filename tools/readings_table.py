"""The table in docs/architecture.md of what the preset `paper` sets otherwise than `trimmoe`.

    python tools/readings_table.py

A test says when it is out of date.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from trimmoe.policy.presets import paper, trimmoe

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
BEGIN, END = "<!-- made by tools/readings_table.py -->\n", "<!-- to here -->\n"


def main() -> None:
    before, _, after = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, rest = after.partition(END)
    PAGE.write_text(before + BEGIN + table() + END + rest, encoding="utf-8")


def table() -> str:
    """A line per option that differs; those of levers too."""
    ours, theirs = _options(trimmoe()), _options(paper())
    rows = [(name, ours[name], theirs[name]) for name in ours if ours[name] != theirs[name]]
    head = "| option | `trimmoe` | `paper` |\n|---|---|---|\n"
    return "\n" + head + "".join(f"| `{name}` | {a} | {b} |\n" for name, a, b in rows) + "\n"


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
