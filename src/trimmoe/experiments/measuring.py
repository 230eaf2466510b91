"""Measuring the servers of a cluster that run: they time themselves, one after another and then all
at once. Their links are measured by themselves as soon as they are up. What software costs a token
beside all this is what a client's clock says of exact answers beyond what was measured.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

import numpy as np

from trimmoe.core.machines import BATCHES, Machines, Work, machines_header, plausible
from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.experiments.overheads import with_overheads
from trimmoe.experiments.serve_bench import Load, run_load
from trimmoe.progress import Bars
from trimmoe.runtime.launch.addresses import Endpoint
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.model import served_name
from trimmoe.runtime.machine_report import LinkReport, MachineReport

PATIENCE_S = 120.0
"""For one server to time itself."""
_AGAIN_S = 0.5
"""Until a server that gave no figures is asked again."""
PROMPTS = (
    "An operator is a symbol that tells the program to",
    "The history of the city begins with",
    "She opened the door and saw",
)
ANSWER_TOKENS = 32
_MS = 1e3
_SEVERAL = np.array(BATCHES) >= 8
"""Batches of a size that servers have when several compute at once: what one row takes out of the
caches of a processor that is shared says nothing of them."""
_COLDEST = 3.0
"""More than that is a bad measurement."""
_ALIKE_PACE = 1.5
"""Servers of which one takes no longer than so many times the other's for the same layers compute
as fast: a measurement is off by less than that, a machine that is emulated by more."""


class TimedServer(Protocol):
    """A server that times itself when asked."""

    def begin_measuring(self) -> None:
        """Have it begin."""
        ...

    def measured(self, patience_s: float) -> MachineReport | None:
        """What that gave; None if it failed or is not through in time."""
        ...


def measured(
    config: ServeConfig,
    artifacts: Artifacts,
    where: Sequence[Endpoint],
    handles: Sequence[TimedServer],
    stop: threading.Event | None = None,
) -> Machines:
    """What servers that run and answer to `where` can do. Raises `UserError` if none answers, also
    since they ended at `stop`."""
    with _bar(2 * len(handles) + 2) as advance:
        alone: list[MachineReport | None] = []
        for handle in handles:
            alone.append(timed(handle, stop))
            advance()
        before_s = asyncio.run(_clocked(config, where, range(len(where))))
        advance()
        for handle in handles:
            handle.begin_measuring()
        together = []
        for handle in handles:
            together.append(handle.measured(PATIENCE_S))
            advance()
        # All that the clock shows beyond kernels is put to software: whoever else uses the host
        # for some seconds must not be.
        after_s = asyncio.run(_clocked(config, where, range(len(where))))
        advance()
    machines = machines_of(artifacts, config, alone, together)
    return with_overheads(machines, artifacts, np.fmin(before_s, after_s))


def measured_by_one(
    config: ServeConfig,
    artifacts: Artifacts,
    where: Sequence[Endpoint],
    handle: TimedServer,
    server: int,
) -> Machines:
    """The same for servers of one machine, of which one speaks for all: a quarter of the time, but
    nobody sees what they take when all compute. Raises `UserError` if it does not answer."""
    with _bar(2) as advance:
        told = timed(handle)
        advance()
        clock_s = asyncio.run(_clocked(config, where, [server]))
        advance()
    reports: list[MachineReport | None] = [None] * len(where)
    if told is not None:
        # Its links are its own.
        reports = [told if at == server else replace(told, links=()) for at in range(len(where))]
    machines = machines_of(artifacts, config, reports, [None] * len(where))
    return with_overheads(machines, artifacts, clock_s)


def timed(
    server: TimedServer, stop: threading.Event | None = None, patience_s: float = PATIENCE_S
) -> MachineReport | None:
    """What a server times by itself, once it is there again if it goes away; None if it is not
    through in time, or before `stop`."""
    stop, end_s = stop or threading.Event(), time.monotonic() + patience_s
    while True:
        server.begin_measuring()
        report = server.measured(max(end_s - time.monotonic(), 0.0))
        if report is not None or time.monotonic() > end_s or stop.wait(_AGAIN_S):
            return report


async def _clocked(
    config: ServeConfig, where: Sequence[Endpoint], servers: Iterable[int]
) -> FloatArray:
    """Mean time per output token of the users of some servers, [M] seconds; NaN where none came."""
    name = config.served_name or served_name(config.model)
    found = np.full(len(where), np.nan)
    for at in servers:
        load = Load(
            base_url=where[at].url.removesuffix("/v1"),
            endpoint="/v1/completions",
            model=name,
            prompts=PROMPTS,
            output_tokens=ANSWER_TOKENS,
            max_concurrency=1,
            ignore_eos=True,
            api_key=config.api_keys[0] if config.api_keys else None,
        )
        sent, _ = await run_load(load)
        # The first answer finds nothing warm.
        taken = [one.tpot_s for one in sent[1:] if one.error is None and one.tpot_s is not None]
        if taken:
            found[at] = float(np.median(taken))
    return found


def machines_of(
    artifacts: Artifacts,
    config: ServeConfig,
    alone: Sequence[MachineReport | None],
    together: Sequence[MachineReport | None],
) -> Machines:
    """What servers said of themselves, nonsense taken at its slowest plausible; nothing is known
    yet of what software costs."""
    cluster = artifacts.plan.cluster
    count, known = len(alone), np.array([one is not None for one in alone])
    shape = (3, len(Work), len(BATCHES))
    said = np.stack([np.full(shape, np.nan) if one is None else one.work_s for one in alone])
    low_s, work_s, high_s = (plausible(said[:, q], known) for q in range(3))
    ratio = np.ones(count)
    for at, one in enumerate(together):
        if one is not None and known[at]:
            longer = float(np.median((one.work_s[1] / work_s[at])[:, _SEVERAL]))
            ratio[at] = max(longer, 1.0) if np.isfinite(longer) else 1.0
    machine = _numbered([None if one is None else one.machine for one in alone])
    delay_s, bandwidth, jitter_s = links_of(
        cluster.server_names, [() if one is None else one.links for one in alone]
    )
    return Machines(
        header=machines_header(
            cluster,
            config.quantise,
            settings={
                "devices": [None if one is None else one.device for one in alone],
                "threads": [None if one is None else one.threads for one in alone],
            },
            input_hashes={
                "model": artifacts.profile.model_hash,
                "profile": artifacts.profile.hash,
                "plan": artifacts.plan.hash,
            },
        ),
        cluster_name=cluster.name,
        server_names=cluster.server_names,
        model_hash=artifacts.profile.model_hash,
        precision=config.quantise,
        batches=np.array(BATCHES),
        work_s=work_s,
        low_s=low_s,
        high_s=high_s,
        together=ratio,
        machine=machine,
        free_bytes=np.array([0 if one is None else one.free_bytes for one in alone]),
        delay_s=delay_s,
        bandwidth_bytes_per_s=bandwidth,
        jitter_s=jitter_s,
        software_s=_software_s(alone, known, work_s, machine),
        hop_s=np.zeros(count),
        token_s=np.zeros(count),
        head_right=min((one.head_right for one in alone if one is not None), default=0.0),
        naming_s=_naming_s(alone),
        cold=_cold(work_s, together, ratio, machine),
    )


def _software_s(
    alone: Sequence[MachineReport | None],
    known: BoolArray,
    work_s: FloatArray,
    machine: IntArray,
) -> FloatArray:
    """What the interpreter takes for the same on every server, [M]. It takes as long on all of a
    machine that compute as fast: who took longer was kept from its core meanwhile."""
    said_s = plausible(
        np.array([np.nan if one is None else one.software_s for one in alone]), known
    )
    pace = np.median(work_s / work_s.min(axis=0), axis=(1, 2))
    alike = (machine[:, None] == machine) & (pace[:, None] <= _ALIKE_PACE * pace)
    return np.where(alike, said_s, np.inf).min(axis=1)


def _cold(
    work_s: FloatArray,
    together: Sequence[MachineReport | None],
    ratio: FloatArray,
    machine: IntArray,
) -> FloatArray:
    """As in `Machines`: what a few rows take all servers of a machine at once over what they take
    one alone, [M, W, B], beyond the `ratio` [M] by which each waits for a core. No longer for
    further rows, and the middle of its servers, since what is quick is timed badly."""
    found = np.ones(work_s.shape)
    for here in np.unique(machine):
        told = [
            one.work_s[1] / work_s[at] / ratio[at]
            for at, one in enumerate(together)
            if one is not None and machine[at] == here
        ]
        if len(told) > 1:
            sane = [np.where(np.isfinite(each) & (each > 0.0), each, 1.0) for each in told]
            longer = np.minimum.accumulate(np.median(sane, axis=0), axis=1)
            found[machine == here] = np.where(_SEVERAL, 1.0, np.clip(longer, 1.0, _COLDEST))
    return found


def _naming_s(alone: Sequence[MachineReport | None]) -> FloatArray | None:
    """Of each server, [M]; None if none has a draft head."""
    said = np.array([math.nan if one is None else one.naming_s for one in alone])
    if not (np.isfinite(said) & (said > 0)).any():
        return None
    return plausible(said, np.array([one is not None for one in alone]))


def links_of(names: Sequence[str], told: Sequence[Sequence[LinkReport]]) -> FloatArray:
    """Delay, bandwidth and jitter of the links that servers told of, NaN where nobody said anything
    that makes sense, [3, M, M]."""
    links = np.full((3, len(names), len(names)), np.nan)
    index = {name: at for at, name in enumerate(names)}
    for at, mine in enumerate(told):
        for link in mine:
            if (to := index.get(link.peer, at)) == at:
                continue
            values = (link.delay_s, link.bandwidth_bytes_per_s, link.jitter_s)
            links[:, at, to] = [
                value if value is not None and 0.0 <= value < np.inf else np.nan for value in values
            ]
    for part, own in zip(links, (0.0, np.inf, 0.0), strict=True):
        np.fill_diagonal(part, own)
    return links


def _numbered(names: Sequence[str | None]) -> IntArray:
    """Equal numbers for equal names; who is unknown is by itself."""
    known = [name if name is not None else f"unknown {at}" for at, name in enumerate(names)]
    order = list(dict.fromkeys(known))
    return np.array([order.index(name) for name in known])


@contextmanager
def _bar(steps: int) -> Iterator[Callable[[], None]]:
    with Bars() as progress:
        task = progress.add_task("Measuring", total=steps)
        yield lambda: progress.advance(task)
