"""The ledger that a generation ends with, as tables."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trimmoe.core.ledger import EXECUTED, REMOTE, STOOD_IN, SUBSTITUTED, Kind, Ledger


def print_ledger(
    console: Console, pieces: Sequence[tuple[str, Ledger]], server_names: tuple[str, ...]
) -> None:
    """Per token, per link and in total; `pieces` are generated texts with their ledgers."""
    if not pieces:
        console.print("One token was generated, by the exactly run prompt: nothing to account for.")
        return
    total = pieces[0][1]
    for _, ledger in pieces[1:]:
        total = total + ledger
    console.print(_token_table(pieces))
    console.print(_link_table(total, server_names))
    console.print(summary(total))


def summary(total: Ledger) -> str:
    """One sentence on what a generation cost."""
    spent = f"{total.loss:.4f} of {total.budget:.4f} credited"
    return (
        f"{total.tokens} tokens decoded: expected delay {total.mean_delay_s * 1e3:.1f} ms per "
        f"token, {total.hops / total.tokens:.1f} hops per token, "
        f"{total.total_bytes / 1e3:.1f} kB sent, "
        f"{total.share(Kind.SKIPPED):.1%} of layers skipped, {total.share(Kind.EXITED):.1%} "
        f"removed by exits, {total.slots_dropped / total.tokens:.1f} slots dropped per token in "
        f"other layers, quality budget spent {spent}."
    )


def _token_table(pieces: Sequence[tuple[str, Ledger]]) -> Table:
    table = Table(
        title="Layers of each token by what became of them, and what the token cost",
        caption="run: executed; of these remote and subst. (some slot remote, substituted),\n"
        "copies (else some slot ran its expert's stand-in)",
        box=box.SIMPLE_HEAD,
        padding=0,
    )
    table.add_column("token", no_wrap=True, max_width=14)
    columns = "run", "remote", "subst.", "copies", "skip", "exit", "hops", "kB", "ms", "budget"
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for text, ledger in pieces:
        kinds = ledger.kinds.sum(0)
        remote = kinds[list(REMOTE)].sum()
        table.add_row(
            escape(repr(text)[1:-1]),
            str(kinds[list(EXECUTED)].sum()),
            str(remote),
            str(kinds[list(SUBSTITUTED)].sum()),
            str(kinds[list(STOOD_IN)].sum()),
            str(kinds[Kind.SKIPPED]),
            str(kinds[Kind.EXITED]),
            str(ledger.hops),
            f"{ledger.total_bytes / 1e3:.1f}",
            f"{ledger.delay_s * 1e3:.1f}",
            f"{ledger.loss:.4f}",
        )
    return table


def _link_table(total: Ledger, server_names: tuple[str, ...]) -> Table:
    table = Table(title="What each link carried", box=box.SIMPLE_HEAD)
    table.add_column("from")
    table.add_column("to")
    table.add_column("hops", justify="right")
    table.add_column("bytes", justify="right")
    for source, target in np.argwhere(total.messages > 0):
        hops = int(total.messages[source, target])
        size = str(hops * total.hidden_bytes)
        table.add_row(server_names[int(source)], server_names[int(target)], str(hops), size)
    return table
