"""The worker of a server, and the engines that it decides with one after another."""

from __future__ import annotations

from trimmoe.core.specs import BoolArray
from trimmoe.models.base import MoEView
from trimmoe.placement.live import live_hosts
from trimmoe.runtime.drafter import Drafter
from trimmoe.runtime.node.compute.pace import EmulatedPace, Pace
from trimmoe.runtime.node.compute.verifying import Verifier
from trimmoe.runtime.node.compute.worker import Worker
from trimmoe.runtime.node.settings import NodeSettings
from trimmoe.runtime.node.watch.deployments import Basis, Built


def make_worker(
    view: MoEView,
    basis: Basis,
    built: Built,
    settings: NodeSettings,
    *,
    verifying: BoolArray,
    drafter: Drafter | None,
) -> Worker:
    """One that decides with the engine that was built; the servers that are `verifying` [M] can be
    asked to compute something again."""
    return Worker(
        view,
        basis.profile,
        built.engine,
        server=settings.server,
        slots=settings.kv_slots,
        seed=settings.seed,
        pace=_pace(view, basis, settings, drafter),
        log_events=settings.log_events,
        drafter=drafter,
        verifier=Verifier(settings.verify_share, _hosts(basis, built), verifying),
    )


def swap_engine(worker: Worker, basis: Basis, built: Built) -> None:
    """Have it decide with another one from now on."""
    worker.swap(built.engine)
    worker.verifier.hosts = _hosts(basis, built)


def _hosts(basis: Basis, built: Built) -> BoolArray:
    return live_hosts(basis.plan.hosts, built.conditions.lost)


def _pace(view: MoEView, basis: Basis, settings: NodeSettings, drafter: Drafter | None) -> Pace:
    share, top_k = settings.batch_share, view.spec.top_k
    if share is None:
        return Pace()
    draft_size = 0.0 if drafter is None else drafter.size(view.spec)
    return EmulatedPace.of(basis.planned.cost, settings.server, share, top_k, draft_size)
