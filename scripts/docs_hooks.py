"""What the documentation site takes from elsewhere than docs/: pages that would be written twice.

mkdocs calls `on_files` before it reads any page; see mkdocs.yml.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).parents[1]
COPIED = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changes.md": "CHANGELOG.md",
}
"""Pages of the site, and the files of the repository that they are."""
_TO_DOCS = re.compile(r"\]\(docs/([^)]+)\)")
_TO_FILE = re.compile(r"\[([^\]]+)\]\((?!https?://|#)(?!docs/)([^)]+)\)")
"""To a file of the repository, which the site does not have."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    from mkdocs.structure.files import File

    pages = {name: for_site((ROOT / source).read_text(encoding="utf-8"))
             for name, source in COPIED.items()}  # fmt: skip
    pages["commands.md"] = commands()
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def for_site(text: str) -> str:
    """A page of the repository's root with its links as they are on the site."""
    text = _TO_FILE.sub(r"\1 (`\2`)", text)
    return _TO_DOCS.sub(lambda found: f"]({found[1]})", text)


def commands() -> str:
    """Every command with its options, as typer's own generator writes them."""
    made = subprocess.run(
        [sys.executable, "-m", "typer", "trimmoe.cli", "utils", "docs", "--name", "trimmoe"],
        capture_output=True,
        text=True,
        check=True,
    )
    # Nobody wants the same line below every command.
    text = made.stdout.replace("* `--help`: Show this message and exit.\n", "")
    text = text.replace("**Options**:\n\n\n", "")
    return text.replace("# `trimmoe`", "# Commands", 1)
