"""What one server can do, timed on its own loop."""

from __future__ import annotations

from trimmoe.models.base import MoEView
from trimmoe.runtime.machine_report import MachineReport, link_reports
from trimmoe.runtime.node.parts import Parts
from trimmoe.runtime.node.settings import NodeSettings
from trimmoe.runtime.probe import free_bytes, machine_name, time_naming, time_software, time_work


async def measured(parts: Parts, view: MoEView, settings: NodeSettings) -> MachineReport:
    """Time it now; requests wait for some seconds."""
    drafts = parts.worker.end_drafts.able
    before_s, work_s, naming_s, after_s = await parts.batch_loop.apart(
        lambda: (
            time_software(),
            time_work(view, parts.worker.draft_runner.own),
            time_naming(view) if drafts else 0.0,
            time_software(),
        )
    )
    # Whoever shares the core with a virtual machine is busy for seconds at a time.
    software_s = min(before_s, after_s)
    return MachineReport(
        server=parts.transport.name,
        machine=machine_name(),
        device=str(view.device),
        threads=settings.threads,
        free_bytes=free_bytes(view.device),
        software_s=software_s * settings.slowdown,
        work_s=work_s * settings.slowdown,
        links=link_reports(parts.transport.link_estimates().values()),
        head_right=_head_right(view) if drafts else 0.0,
        naming_s=naming_s * settings.slowdown,
    )


def _head_right(view: MoEView) -> float:
    """Of its first drafts, as the head's file says."""
    right = () if view.draft_head is None else view.draft_head.right
    return right[0] if right else 0.0
