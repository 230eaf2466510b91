"""Being the one supervisor of a run folder, after whoever was it before."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from trimmoe.core.errors import UserError
from trimmoe.runtime.launch.control import Control, Question, Unreachable
from trimmoe.runtime.launch.folder import RunFolder
from trimmoe.runtime.launch.job import Job
from trimmoe.runtime.launch.note import Note
from trimmoe.runtime.launch.signals import Stop

_LEAVING_S = 20.0
"""What a keeper gets to leave its servers, and an order to stop to reach it."""
_POLL_S = 0.05


@contextlib.contextmanager
def supervising(
    folder: RunFolder, job: Job, stop: Stop, say: Callable[[str], None]
) -> Iterator[tuple[RunFolder, Job]]:
    """This process is the folder's supervisor meanwhile; `trimmoe stop` sets `stop`.

    Yields the job to start: `job`, or what servers already are that live without a supervisor and
    would be started just so. Raises `UserError` if other servers live there.
    """
    lock = _claimed(folder)
    try:
        job = _taken_over(folder, job, say)
        answers = {"leave": lambda: False, "stop": stop.set}
        with contextlib.closing(Control(folder.supervisor_socket, answers)):
            yield folder, job
    finally:
        if not folder.alive():
            folder.clear()
        os.close(lock)


def stop_servers(folder: RunFolder, patience_s: float = _LEAVING_S) -> bool:
    """Have whoever supervises the folder end its servers; whether all are gone in time."""
    end_s = time.monotonic() + patience_s
    while folder.alive() and time.monotonic() < end_s:
        # Servers whose supervisor was killed a moment ago have none yet to be told.
        ask(folder, "stop")
        time.sleep(_POLL_S)
    return not folder.alive()


def ask(folder: RunFolder, question: str) -> Any:
    """What the folder's supervisor answers; None if there is none."""
    try:
        asked = Question(folder.supervisor_socket, question)
        if asked.answered(_LEAVING_S):
            return asked.answer()
        asked.close()
    except Unreachable:
        pass
    return None


def _claimed(folder: RunFolder) -> int:
    """The folder's lock, from a keeper if one has it."""
    end_s = time.monotonic() + _LEAVING_S
    while (lock := folder.claim()) is None:
        if ask(folder, "leave") is False:
            raise UserError(
                f"Another `trimmoe serve` runs at port {folder.port}; end it, or choose "
                "another --port-base."
            )
        if time.monotonic() > end_s:
            raise UserError(
                f"What watches the servers at port {folder.port} does not answer; end them "
                "with `trimmoe stop`, or choose another --port-base."
            )
        time.sleep(_POLL_S)
    return lock


def _taken_over(folder: RunFolder, job: Job, say: Callable[[str], None]) -> Job:
    if not folder.alive():
        folder.write(job)
        return job
    before, note = folder.read(), folder.note()
    if before is not None and before.identity == job.identity:
        say("The servers run already; taking them over.")
        return before
    own = job.note()
    if before is None and note is not None and note.cluster == own.cluster:
        return _upgraded(folder, job, note, say)
    raise UserError(
        f"Other servers run at port {folder.port}, whose `trimmoe serve` was killed; end "
        "them with `trimmoe stop`, or choose another --port-base."
    )


def _upgraded(folder: RunFolder, job: Job, note: Note, say: Callable[[str], None]) -> Job:
    """The job that takes the place of another version's; raises `UserError` if its servers would
    not understand those."""
    own = job.note()
    if note.wire != own.wire:
        raise UserError(
            f"The servers at port {folder.port} run TrimMoE {note.version} and speak version "
            f"{note.wire} of the protocol between servers, {own.version} speaks {own.wire}; end "
            "them with `trimmoe stop` first."
        )
    say(f"The servers run TrimMoE {note.version}; taking them over.")
    job = replace(job, token=note.token)
    folder.write(job)
    return job
