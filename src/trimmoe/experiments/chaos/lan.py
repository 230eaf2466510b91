"""A network of this process's own: a switch that it sits at, machines as namespaces of Linux, and
cables between them that can be pulled.

Machines cannot reach anything else, and nobody can reach them. All of it ends with the processes.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys

_CLONE_NEWNET = 0x40000000
_SWITCH = "switch"
_HERE = "10.77.0.254"
_MOST = 200
_AS_ROOT = "TRIMMOE_CHAOS_AS_ROOT"
"""Set once this process has become root of a user namespace of its own."""


class NotAllowed(Exception):
    """Why there can be no such network, as a clause."""


class Lan:
    """Machines by number from 0 on. To be made before there is any other thread: each thread has a
    namespace of its own."""

    def __init__(self, machines: int) -> None:
        """Raises `NotAllowed`."""
        assert machines <= _MOST
        _require_tools()
        try:
            _unshare()
        except OSError as error:
            raise NotAllowed(f"it lets nobody make a network ({error.strerror})") from error
        self._switch = os.open("/proc/self/ns/net", os.O_RDONLY)
        self._machines = list[int]()
        try:
            _ip("link", "set", "lo", "up")
            _ip("link", "add", _SWITCH, "type", "bridge")
            _ip("address", "add", f"{_HERE}/24", "dev", _SWITCH)
            _ip("link", "set", _SWITCH, "up")
            for machine in range(machines):
                self._machines.append(self._joined(machine))
        except OSError as error:
            raise NotAllowed(f"it has no bridges or no pairs of links ({error})") from error

    def address(self, machine: int) -> str:
        return f"10.77.0.{machine + 1}"

    def path(self, machine: int | None) -> str:
        """Where another process finds the network of a machine, or of the switch."""
        descriptor = self._switch if machine is None else self._machines[machine]
        return f"/proc/{os.getpid()}/fd/{descriptor}"

    def cut(self, machine: int) -> None:
        """Nothing passes between it and anybody, the switch included."""
        _ip("link", "set", _port(machine), "down")

    def mend(self, machine: int) -> None:
        _ip("link", "set", _port(machine), "up")

    def part(self, one: int, other: int) -> None:
        """Nothing passes between the two; both reach all others."""
        self._set_apart((one, other), "on")

    def join(self, one: int, other: int) -> None:
        self._set_apart((one, other), "off")

    def _set_apart(self, machines: tuple[int, int], how: str) -> None:
        for machine in machines:
            _ip("link", "set", _port(machine), "type", "bridge_slave", "isolated", how)

    def _joined(self, machine: int) -> int:
        """A new machine with its cable; a descriptor keeps it."""
        _unshare()
        made = os.open("/proc/self/ns/net", os.O_RDONLY)
        # Somebody who is there for the other end of the cable to be given to.
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as there:
            _setns(self._switch)
            _ip(
                *("link", "add", _port(machine), "type", "veth"),
                *("peer", "name", "eth0", "netns", str(there.pid)),
            )
            there.terminate()
        _ip("link", "set", _port(machine), "master", _SWITCH, "up")
        _setns(made)
        try:
            _ip("link", "set", "lo", "up")
            _ip("address", "add", f"{self.address(machine)}/24", "dev", "eth0")
            _ip("link", "set", "eth0", "up")
        finally:
            _setns(self._switch)
        return made


def enter(path: str) -> None:
    """Be in another network from now on: this thread, and those it starts. Raises `OSError`."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _setns(descriptor)
    finally:
        os.close(descriptor)


def become_root_if_need_be() -> None:
    """Start this process anew as root of a user namespace of its own, unless it is root already or
    the system allows nobody that."""
    if os.geteuid() == 0 or _AS_ROOT in os.environ or shutil.which("unshare") is None:
        return
    as_root = ["unshare", "--user", "--map-root-user"]
    if subprocess.run([*as_root, "true"], capture_output=True, check=False).returncode == 0:
        os.environ[_AS_ROOT] = "1"
        os.execvp(as_root[0], [*as_root, sys.executable, "-m", "trimmoe.cli", *sys.argv[1:]])


def _port(machine: int) -> str:
    return f"machine{machine}"


def _ip(*given: str) -> None:
    """Raises `OSError` with what it says."""
    ran = subprocess.run(["ip", *given], capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise OSError(ran.stderr.strip().partition("\n")[0] or f"ip {given[0]} failed")


def _require_tools() -> None:
    if not sys.platform.startswith("linux"):
        raise NotAllowed("it is not Linux")
    if shutil.which("ip") is None:
        raise NotAllowed("it lacks the command `ip`, of iproute2")


def _unshare() -> None:
    _checked(ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET))


def _setns(descriptor: int) -> None:
    _checked(ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET))


def _checked(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
