"""A supervisor without a terminal: `python -m trimmoe.runtime.launch.keeper FOLDER LOCK`.

Servers start it when theirs was killed. It watches them as the one before did, until `trimmoe stop`
or SIGTERM ends them, or until a `trimmoe serve` of the same cluster takes them over.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

from trimmoe.runtime.launch.control import Control
from trimmoe.runtime.launch.folder import RunFolder

_log = logging.getLogger("trimmoe.keeper")


def start_keeper(folder: RunFolder, lock: int) -> None:
    """Hand the folder's lock to a new keeper."""
    try:
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder.path), str(lock)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(lock,),
            start_new_session=True,
        )
    finally:
        os.close(lock)


def keep(folder: RunFolder) -> None:
    """Watch the folder's servers until told to end them or to leave them to another."""
    from trimmoe.runtime.launch.processes import start_processes
    from trimmoe.runtime.launch.signals import stop_on_signal
    from trimmoe.runtime.launch.supervise import Supervisor

    job = folder.read()
    if job is None:
        return
    leaving = threading.Event()

    with stop_on_signal() as stop:

        def leave() -> bool:
            leaving.set()
            stop.set()
            return True

        control = Control(folder.supervisor_socket, {"leave": leave, "stop": stop.set})
        supervisor = Supervisor(start_processes(folder, job), say=_log.info, stopping=stop)
        _log.info("Watching the servers, whose supervisor was killed.")
        supervisor.watch()
        control.close()
        if not leaving.is_set():
            supervisor.stop()
            folder.clear()


def main() -> None:
    from trimmoe.runtime.launch.process import keeper_log_path

    folder, lock = RunFolder(Path(sys.argv[1])), int(sys.argv[2])
    os.set_inheritable(lock, False)
    logging.basicConfig(
        filename=keeper_log_path(folder.port),
        level=logging.INFO,
        format="%(asctime)s %(message)s",
    )
    try:
        keep(folder)
    except Exception:
        _log.exception("This supervisor failed; another will take its place.")
        raise


if __name__ == "__main__":
    main()
