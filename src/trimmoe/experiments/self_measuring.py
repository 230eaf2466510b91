"""`trimmoe serve` on one machine measures its servers itself where nobody has done so lately."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from pathlib import Path

import trimmoe
from trimmoe.core.artifact import file_hash
from trimmoe.core.errors import UserError
from trimmoe.core.machines import Machines, load_machines
from trimmoe.experiments.probing import probe
from trimmoe.experiments.serve_cluster import Say, pieces_of, serve_here
from trimmoe.models.embedded.materialise import default_cache_dir
from trimmoe.runtime.launch.artifacts import cluster_of, model_spec_of
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.folder import RunFolder
from trimmoe.runtime.probe import machine_name

RECENT_S = 24 * 3600.0
"""For how long figures are taken to hold."""

Probe = Callable[[ServeConfig, Say], Machines | None]


def serve_measured(config: ServeConfig, say: Say, *, measure: bool) -> None:
    """`serve_here` by what was measured lately, or, with `measure`, is measured first. Raises
    `UserError`."""
    # What can be refused at once is refused before anything is measured.
    pieces_of(config)
    known = with_machines(config, say, probe=probe) if measure else config
    if known is not None:
        serve_here(known, say)


def with_machines(
    config: ServeConfig,
    say: Say,
    *,
    probe: Probe,
    folder: Path | None = None,
    now_s: Callable[[], float] = time.time,
) -> ServeConfig | None:
    """The settings with what was measured of these servers; None if told to stop meanwhile.

    As they are where a plan or a method says what to do, where there is one server only, so that
    nothing is to be planned, and where measuring fails.
    """
    if config.cluster is None or config.machines or config.plan or config.method:
        return config
    names = cluster_of(config).server_names
    if len(names) == 1:
        return config
    path = (folder or default_cache_dir()) / "machines" / f"{_key(config)}.trim"
    # Servers that run on after their supervisor are taken over by the figures they began with.
    runs = bool(RunFolder.at(config.port_base).alive())
    known = _known(path, config)
    if known is not None and (runs or _is_recent(known, path, now_s())):
        say(f"Planning by what was measured of {', '.join(names)} before.")
        return config.model_copy(update={"machines": path})
    if runs:
        return config
    say(
        f"Measuring {', '.join(names)}, which nobody has lately; this takes a minute, and "
        "--no-probe leaves it out ..."
    )
    try:
        found = probe(config, lambda _: None)
        if found is None:
            return None
        path.parent.mkdir(parents=True, exist_ok=True)
        found.save(path)
    except (OSError, UserError) as error:
        say(f"The servers were not measured, so plans are by nominal figures: {error}")
        return config
    say("Planning by what was measured.")
    return config.model_copy(update={"machines": path})


def _known(path: Path, config: ServeConfig) -> Machines | None:
    """Figures of these servers and this model, if they are there."""
    if not path.is_file():
        return None
    try:
        known = load_machines(path)
    except UserError:
        return None
    return known if known.model_hash == model_spec_of(config).model_hash else None


def _is_recent(known: Machines, path: Path, now_s: float) -> bool:
    """Whether figures still hold: another version's servers take something else."""
    is_of_this = known.header.trimmoe_version == trimmoe.__version__
    return is_of_this and abs(now_s - path.stat().st_mtime) < RECENT_S


def _key(config: ServeConfig) -> str:
    """Names what figures are of: all that changes what servers take."""
    assert config.cluster is not None
    told = (
        machine_name(), file_hash(config.cluster), config.model, config.quantise.value,
        config.threads, config.device, config.dtype, config.emulate, config.emulate_links,
        config.emulate_machines, config.encrypt,
    )  # fmt: skip
    return hashlib.sha256(repr(told).encode()).hexdigest()[:24]
