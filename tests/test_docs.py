"""The documentation site's own pages, and the notebook."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from trimmoe import cli

ROOT = Path(__file__).parents[1]
HOOKS = runpy.run_path(str(ROOT / "scripts" / "docs_hooks.py"))
PICTURE = runpy.run_path(str(ROOT / "tools" / "data_picture.py"))
READINGS = runpy.run_path(str(ROOT / "tools" / "readings_table.py"))


def pages(nav: Any) -> list[str]:
    """Files that a navigation names."""
    if isinstance(nav, str):
        return [nav]
    return [
        page for part in (nav.values() if isinstance(nav, dict) else nav) for page in pages(part)
    ]


def test_every_page_is_in_the_navigation() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    written = {path.name for path in (ROOT / "docs").iterdir() if path.suffix in (".md", ".ipynb")}
    assert sorted(pages(nav)) == sorted({*written, *HOOKS["COPIED"], "commands.md"})


def test_every_command_is_shown_with_every_option() -> None:
    shown = HOOKS["commands"]()

    def check(command: Any, name: str) -> None:
        _, _, rest = shown.partition(f"# `{name}`\n")
        section = re.split(r"^#", rest, maxsplit=1, flags=re.MULTILINE)[0]
        for parameter in command.params:
            for option in parameter.opts if parameter.param_type_name == "option" else ():
                assert option in section, f"{name} {option}"
        for each, sub in getattr(command, "commands", {}).items():
            assert f"`{each}`" in shown
            check(sub, f"{name} {each}")

    root = typer.main.get_command(cli.app)
    for each, sub in root.commands.items():  # type: ignore[attr-defined]
        check(sub, f"trimmoe {each}")
    assert "Show this message" not in shown


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_of_the_repositorys_pages_hold_there_and_on_the_site(name: str) -> None:
    text = (ROOT / name).read_text()
    for link in re.findall(r"\]\((?!https?://|#)([^)#]+)", text):
        assert (ROOT / link).exists(), link
    for link in re.findall(r"\]\((?!https?://|#)([^)#]+)", HOOKS["for_site"](text)):
        assert (ROOT / "docs" / link).exists(), link


def test_the_picture_of_the_datas_way_is_that_of_the_code() -> None:
    shown = PICTURE["PAGE"].read_text()
    assert PICTURE["BEGIN"] + PICTURE["picture"]() + PICTURE["END"] in shown, PICTURE["__doc__"]


def test_the_table_of_readings_is_that_of_the_presets() -> None:
    shown = READINGS["PAGE"].read_text()
    assert READINGS["BEGIN"] + READINGS["table"]() + READINGS["END"] in shown, READINGS["__doc__"]


def test_the_page_of_what_to_change_where_names_what_there_is() -> None:
    """Files of the package and of tests, and constants in the files named with them."""
    source, rows = ROOT / "src" / "trimmoe", 0
    for row in (ROOT / "docs" / "changing.md").read_text().split("\n"):
        *_, where, _, tests, _ = row.split("|") if row.count("|") == 5 else [""] * 5
        for test in re.findall(r"`(test_\w+\.py)`", tests):
            assert (ROOT / "tests" / test).exists(), test
            rows += 1
        files = re.findall(r"`([\w/]+(?:\.py|/))`", where)
        text = "".join((source / file).read_text() for file in files if file.endswith(".py"))
        assert all((source / file).exists() for file in files), files
        for name in re.findall(r"`([A-Z_]+)`", where):
            assert re.search(rf"^{name}\b.*=", text, re.MULTILINE), name
    assert rows >= 10


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.name)
def test_links_of_the_sites_pages_stay_on_the_site(page: Path) -> None:
    """But for pages that are made when it is built."""
    made = {*HOOKS["COPIED"], "commands.md"}
    for link in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
        found = (page.parent / link).resolve()
        assert link in made or (found.exists() and found.parent == page.parent), link


def test_the_notebook_runs_and_says_what_it_did() -> None:
    """Plain text of results that do not hang on rounding; pictures only have to be drawn."""
    nbformat = pytest.importorskip("nbformat", reason="comes with the extra `dev`")
    nbclient = pytest.importorskip("nbclient", reason="comes with the extra `dev`")
    path = ROOT / "docs" / "tour.ipynb"
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    nbclient.NotebookClient(book, timeout=300, kernel_name="python3").execute()
    written = json.loads(path.read_text())
    for ran, before in zip(book.cells, written["cells"], strict=True):
        if ran.cell_type == "code":
            assert kinds(ran.outputs) >= kinds(before["outputs"])
    assert book.cells[7].outputs[-1]["data"]["text/plain"] == "True"


def kinds(outputs: list[Any]) -> set[str]:
    """Kinds of content that a cell shows."""
    return {kind for output in outputs for kind in output.get("data", {"text": ""})}
