"""The report over all figures: Markdown, and one HTML file that needs no other."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterator
from pathlib import Path

import trimmoe
from trimmoe.core.artifact import written_whole
from trimmoe.experiments.figures.base import Content, Figure, Grid
from trimmoe.experiments.figures.claims import COLUMNS, claim_rows, missed, shown
from trimmoe.experiments.figures.suite import FIGURES, stem

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1100px;margin:2em auto;padding:0 1em;color:#222}
table{border-collapse:collapse;margin:1em 0;font-size:13px}
caption{text-align:left;font-weight:600;padding:.3em 0}
th,td{border-bottom:1px solid #ddd;padding:.25em .7em;text-align:right}
th:first-child,td:first-child{text-align:left}
img{max-width:100%}
.paper{color:#555;border-left:3px solid #bbb;padding-left:.8em}
"""


def write_report(contents: dict[str, Content], folder: Path) -> tuple[Path, Path]:
    """Write `report.md` and `report.html` beside the pictures in `folder`; both paths.

    `contents` holds the JSON of every figure, by number.
    """
    markdown, page = folder / "report.md", folder / "report.html"
    with written_whole(markdown) as temporary:
        temporary.write_text("\n".join(_markdown(contents)) + "\n", encoding="utf-8")
    with written_whole(page) as temporary:
        temporary.write_text("\n".join(_html(contents, folder)) + "\n", encoding="utf-8")
    return markdown, page


def head_grid(contents: dict[str, Content]) -> Grid:
    """Every claim, the paper's number, ours in every column; a star marks a margin reached."""
    rows = []
    for row in claim_rows(contents):
        cells = []
        for column in COLUMNS:
            star = " *" if row["reached"][column] else ""
            cells.append(shown(row["ours"][column], kind=row["kind"]) + star)
        paper = "-" if row["paper"] is None else shown(row["paper"], kind=row["kind"])
        rows.append((row["claim"], paper, *cells))
    return Grid(headings=("claim", "paper", *COLUMNS.values()), rows=rows)


def about(contents: dict[str, Content]) -> list[str]:
    """What was run on what, and how to read it."""
    any_content = next(iter(contents.values()))
    world = any_content["world"]
    origin = (
        "tokens recorded from the real model"
        if world["source"] == "recorded"
        else "generated tokens with assumed statistics, not a measurement of this model"
    )
    return [
        f"{world['model']} ({world['layers']} MoE layers, top-{world['top_k']} of "
        f"{world['experts']} experts) on {world['cluster']} with {len(world['servers'])} servers; "
        f"{world['tokens']} tokens: {origin}. TrimMoE {trimmoe.__version__}, seed "
        f"{any_content['seed']}.",
        "Delays and traffic are simulated by the engine's own cost model, per decoded token; the "
        "paper's figures come from its testbed, and its latencies are read as per token. Losses "
        "called charged are what calibration books against the budget; only what is called "
        "measured was found by executing the model. A star marks a margin of the paper's that is "
        "reached. Traffic counts the hidden vectors that cross a link: the paper's 1.05 GB per "
        "1000 tokens is what Mixtral's 32 layers would send if both slots of every layer were "
        "dispatched and returned (2 x 2 x 8 KiB each), and the 4.6 GB that follow for EdgeShard "
        "are over four times as much, so traffic compares as shares only.",
        "Charges hold what trimming flips of later tokens too, except where the paper's preset "
        "runs, which knows nothing of that. Of generated tokens it is an assumption, fitted to the "
        "embedded model.",
        "The authors' testbed is not published in detail; this cluster only lies in its ranges.",
    ]


def _sections(contents: dict[str, Content]) -> Iterator[tuple[Figure, Content]]:
    for number, figure in FIGURES.items():
        if number in contents:
            yield figure, contents[number]


def _heading(figure: Figure) -> str:
    return f"Fig. {figure.number}: {figure.title}" if figure.number.isdigit() else figure.title


def _whole(contents: dict[str, Content]) -> bool:
    """Whether the claims can be judged: every figure is there."""
    return set(FIGURES) <= contents.keys()


def _markdown(contents: dict[str, Content]) -> Iterator[str]:
    yield "# The paper's evaluation, reproduced\n"
    yield from (f"{text}\n" for text in about(contents))
    if _whole(contents):
        yield "## Claims\n"
        yield from _markdown_grid(head_grid(contents))
        yield from (f"- {text}" for text in missed(claim_rows(contents), contents))
    for figure, content in _sections(contents):
        yield f"\n## {_heading(figure)}\n"
        yield f"> Paper: {figure.paper}\n"
        yield f"![{figure.title}]({stem(figure.number)}.png)\n"
        for caption, grid in figure.grids(content).items():
            yield f"**{caption}**\n"
            yield from _markdown_grid(grid)
        yield from (f"- {text}" for text in figure.findings(content))
    yield "\n## Inputs\n"
    world = next(iter(contents.values()))["world"]
    yield from (f"- {name}: `{value}`" for name, value in world["inputs"].items())


def _markdown_grid(grid: Grid) -> Iterator[str]:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in (grid.headings, *grid.rows)]
    yield f"| {' | '.join(escaped[0])} |"
    yield f"|{'---|' + '---:|' * (len(grid.headings) - 1)}"
    yield from (f"| {' | '.join(row)} |" for row in escaped[1:])
    yield ""


def _html(contents: dict[str, Content], folder: Path) -> Iterator[str]:
    yield '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    yield f"<title>TrimMoE: the paper's evaluation</title><style>{_STYLE}</style></head><body>"
    yield "<h1>The paper's evaluation, reproduced</h1>"
    yield from (f"<p>{html.escape(text)}</p>" for text in about(contents))
    if _whole(contents):
        yield "<h2>Claims</h2>"
        yield from _html_grid("", head_grid(contents))
        yield from _html_list(missed(claim_rows(contents), contents))
    for figure, content in _sections(contents):
        yield f"<h2>{html.escape(_heading(figure))}</h2>"
        yield f'<p class="paper">Paper: {html.escape(figure.paper)}</p>'
        picture = (folder / f"{stem(figure.number)}.png").read_bytes()
        data = base64.b64encode(picture).decode()
        yield f'<img alt="{html.escape(figure.title)}" src="data:image/png;base64,{data}">'
        for caption, grid in figure.grids(content).items():
            yield from _html_grid(caption, grid)
        yield from _html_list(figure.findings(content))
    world = next(iter(contents.values()))["world"]
    yield "<h2>Inputs</h2>"
    yield from _html_list([f"{name}: {value}" for name, value in world["inputs"].items()])
    yield "</body></html>"


def _html_grid(caption: str, grid: Grid) -> Iterator[str]:
    yield "<table>"
    if caption:
        yield f"<caption>{html.escape(caption)}</caption>"
    yield f"<tr>{''.join(f'<th>{html.escape(cell)}</th>' for cell in grid.headings)}</tr>"
    for row in grid.rows:
        yield f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>"
    yield "</table>"


def _html_list(texts: list[str]) -> Iterator[str]:
    yield "<ul>"
    yield from (f"<li>{html.escape(text)}</li>" for text in texts)
    yield "</ul>"
