"""`trimmoe probe`: servers are started as `trimmoe serve` starts them, measured, and ended."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.markup import escape
from rich.table import Table

from trimmoe.core.machines import BATCHES, Machines, Work
from trimmoe.experiments.measuring import measured
from trimmoe.experiments.serve_cluster import Say, artifacts_of, pieces_of
from trimmoe.placement.capacity import human_bytes
from trimmoe.runtime.launch.artifacts import cluster_of
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.local import local_endpoints, require_startable, serve_local
from trimmoe.runtime.launch.processes import ProcessHandle
from trimmoe.runtime.launch.signals import Stop

_MS = 1e3
_ATTEMPTS = 3
"""The last of which counts even if a server was lost in it."""


def probe(config: ServeConfig, say: Say) -> Machines | None:
    """Measure the cluster that `config` describes, on this machine; None if told to stop. Raises
    `UserError`."""
    # Exact answers take what is measured and nothing else.
    config = config.model_copy(update={"policy": "exact", "method": None, "budget": None})
    require_startable(config, cluster_of(config).server_names)
    artifacts = artifacts_of(config, say)
    found: list[Machines] = []

    def meanwhile(handles: Sequence[ProcessHandle], stop: Stop) -> None:
        where = local_endpoints(config, artifacts.plan.cluster.server_names)
        for attempt in range(_ATTEMPTS):
            before = [handle.pid for handle in handles]
            machines = measured(config, artifacts, where, handles, stop)
            if before == [handle.pid for handle in handles] or attempt + 1 == _ATTEMPTS:
                found.append(machines)
                return
            say("A server was lost meanwhile; measuring again ...")

    serve_local(config, artifacts, pieces_of(config), say, meanwhile=meanwhile)
    return found[0] if found else None


def machines_tables(machines: Machines) -> list[Table]:
    """What was measured, for people."""
    work = Table(title="Time of a batch, ms", box=box.SIMPLE_HEAD)
    work.add_column("server")
    work.add_column("work")
    for rows in BATCHES:
        work.add_column(f"{rows} row{'s' if rows > 1 else ''}", justify="right")
    work.add_column("spread", justify="right")
    kinds = "dense layer", "expert", "head", "draft"
    for m, name in enumerate(machines.server_names):
        for kind, title in zip(Work, kinds, strict=True):
            taken_ms = machines.work_s[m, kind] * _MS
            spread = (machines.high_s - machines.low_s)[m, kind, 0] / machines.work_s[m, kind, 0]
            cells = (f"{each:.3g}" for each in taken_ms)
            work.add_row("" if kind else escape(name), title, *cells, f"{spread:.0%}")
    return [work, _links_table(machines), _rest_table(machines)]


def _links_table(machines: Machines) -> Table:
    table = Table(title="Links, ms one way", box=box.SIMPLE_HEAD)
    table.add_column("from")
    for name in machines.server_names:
        table.add_column(escape(name), justify="right")
    for a, name in enumerate(machines.server_names):
        delays = (f"{delay_s * _MS:.2f}" for delay_s in machines.delay_s[a])
        cells = ("" if a == b else each.replace("nan", "?") for b, each in enumerate(delays))
        table.add_row(escape(name), *cells)
    return table


def _rest_table(machines: Machines) -> Table:
    table = Table(title="Servers", box=box.SIMPLE_HEAD)
    for heading in ("server", "machine", "all at once", "a row, cold", "free"):
        table.add_column(heading, justify="left" if heading == "server" else "right")
    for m, name in enumerate(machines.server_names):
        free = human_bytes(int(machines.free_bytes[m]))
        longer = f"{machines.together[m]:.2f}x as long"
        colder = machines.among_others_s[m, Work.DRAFT, 0] / machines.work_s[m, Work.DRAFT, 0]
        cells = (str(machines.machine[m] + 1), longer, f"{colder:.2f}x", free)
        table.add_row(escape(name), *cells)
    return table


def overhead_line(machines: Machines) -> str:
    """What software costs, in a sentence."""
    hop_ms, token_ms = (float(part.min()) * _MS for part in (machines.hop_s, machines.token_s))
    return (
        f"Where it is quickest, software takes {hop_ms:.2f} ms for every message on a token's way "
        f"and {token_ms:.2f} ms for every token."
    )
