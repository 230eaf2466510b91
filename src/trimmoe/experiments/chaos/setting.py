"""Where a run takes place: all servers on this machine, or each on one of its own in a network that
is made for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trimmoe.core.private import write_private
from trimmoe.experiments.chaos.lan import Lan
from trimmoe.experiments.chaos.stage import Machine, Stage
from trimmoe.models.embedded.materialise import default_cache_dir
from trimmoe.runtime.launch.folder import RunFolder
from trimmoe.runtime.wire.keys import generate_token

_OWN = ("joined", "cluster-token")
"""Of the cache folder, what is about clusters and none of a trial's business."""


def on_this_machine(options: Sequence[str], *, port: int, folder: Path) -> Stage:
    """`options` of `trimmoe serve` but for the port, logs in `folder`."""
    serve = (*options, "--port-base", str(port))
    return Stage(
        [Machine(serve=serve, run=RunFolder.at(port))], gateway_port=_gateway(port), folder=folder
    )


def on_machines_of_a_lan(
    options: Sequence[str], names: Sequence[str], lan: Lan, *, port: int, folder: Path
) -> Stage:
    """Likewise, each of the servers by name on a machine of `lan`; the first one is the head."""
    token = folder / "token"
    write_private(token, generate_token().encode())
    cache = _cache(folder)
    known = ("--token-file", str(token))
    head_port = port + 98
    machines = list[Machine]()
    for number, name in enumerate(names):
        if number == 0:
            at = ("--head", "--address", lan.address(0), "--head-port", str(head_port))
            serve = (*at, "--server", name, *known, *options, "--port-base", str(port))
        else:
            serve = ("--join", f"{lan.address(0)}:{head_port}", "--server", name, *known)
        root = folder / str(number)
        root.mkdir(mode=0o700)
        machines.append(
            Machine(
                serve=serve,
                run=RunFolder(root / str(port)),
                environment={"TRIMMOE_RUN": str(root), "TRIMMOE_CACHE": str(cache)},
                network=lan.path(number),
                is_head=number == 0,
            )
        )
    return Stage(machines, gateway_port=_gateway(port), folder=folder, lan=lan)


def _gateway(port: int) -> int:
    """Next to the servers' own: links are 100 above."""
    return port + 99


def _cache(folder: Path) -> Path:
    """This user's models, profiles and plans, and nothing of the clusters it has joined."""
    cache, known = folder / "cache", default_cache_dir()
    cache.mkdir()
    for path in known.iterdir() if known.is_dir() else ():
        if path.name not in _OWN:
            (cache / path.name).symlink_to(path.absolute())
    return cache
