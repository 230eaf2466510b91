"""A process that forks servers: `python -m trimmoe.runtime.launch.forking LINE GENTLY`.

It imports what servers take while its supervisor still plans. Then every `Order` that comes over
the socket LINE has it fork a server; it ends with whoever holds the other end. By then it has one
thread: a fork would cut off others at whatever they are doing.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

from trimmoe.runtime.launch.child import Child
from trimmoe.runtime.launch.folder import RunFolder, say_pid
from trimmoe.runtime.launch.fork_server import Order

_IMPORTED = (
    "transformers.models.qwen2_moe.modeling_qwen2_moe",
    "trimmoe.models.decoder",
    "trimmoe.runtime.launch.keeper",
    "trimmoe.runtime.launch.nodes",
    "trimmoe.runtime.launch.process",
)
"""With most of transformers, whichever model it is. None of it asks for a GPU: a process that has
used one cannot be forked into others that do."""
_LONGEST_ORDER = 1 << 16
_NAME = "trimmoe server"
"""What `top` and `ps` call a server, fifteen letters at most."""
_LEAST_PRIORITY = 19


def _warm(gently: bool) -> None:
    """Import what servers take."""
    if gently:
        # On Linux a thread has a priority of its own; this one ends before anything is forked.
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LEAST_PRIORITY)
    for name in _IMPORTED:
        importlib.import_module(name)
    from trimmoe.models.compiled import read_compiler  # Only here, as all the others.

    read_compiler()
    # What is there now is every server's, and is not looked through for garbage.
    gc.collect()
    gc.freeze()


def _tend(line: socket.socket) -> None:
    """Fork servers until nobody orders any more."""
    while True:
        said, descriptors, _, _ = socket.recv_fds(line, _LONGEST_ORDER, 2)
        if not said:
            return
        if os.fork() == 0:
            line.close()
            # To tear down all that was imported takes a second.
            os._exit(_serve(pickle.loads(said), *descriptors))
        for each in descriptors:
            os.close(each)


def _serve(order: Order, lock: int, log: int) -> int:
    """Be a server to its end; the exit code."""
    try:
        say_pid(lock)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        with contextlib.suppress(OSError):
            Path("/proc/self/comm").write_text(_NAME)
        os.environ.update(order.environment)
        sys.path.extend(each for each in order.import_path if each not in sys.path)
        Child().run(RunFolder(order.folder), order.index)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main() -> None:
    line, gently = socket.socket(fileno=int(sys.argv[1])), bool(int(sys.argv[2]))
    line.set_inheritable(False)
    warming = threading.Thread(target=_warm, args=(gently,))
    warming.start()
    warming.join()
    # Nobody waits for servers that end.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    _tend(line)


if __name__ == "__main__":
    main()
