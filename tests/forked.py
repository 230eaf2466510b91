"""Servers as processes without a supervisor, forked from one that has imported everything: ten
of them start on two cores in the time that one would take from nothing."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection

from launching import free_ports
from quick import popen
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ModelSpec
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.folder import RunFolder
from trimmoe.runtime.launch.job import Pieces, server_spec
from trimmoe.runtime.launch.kernels import compile_decisions
from trimmoe.runtime.launch.local import local_endpoints
from trimmoe.runtime.launch.process import ServerProcess, log_path, log_to_file
from trimmoe.runtime.launch.server import TOKEN_VARIABLE, ServerSpec
from trimmoe.runtime.launch.status import Phase
from trimmoe.runtime.wire.keys import generate_token

STOPPING_S = 10.0
_LOOK_S = 0.05


@contextmanager
def forked(
    model: str,
    profile: Profile,
    plan: Plan,
    spec: ModelSpec,
    pieces: Pieces,
    **settings: object,
) -> Iterator[list[str]]:
    """All servers of a plan, ready; yields their URLs. `settings` are `ServeConfig`'s."""
    names = plan.cluster.server_names
    config = ServeConfig.model_validate(
        {"model": model, "port_base": free_ports(100 + len(names)), **settings}
    )
    artifacts = Artifacts(profile=profile, plan=plan, model=spec)
    where = local_endpoints(config, names)
    folder = RunFolder.at(config.port_base)
    first = server_spec(config, artifacts, pieces, where, one_machine=True, tls=None)
    specs = [replace(first, index=index) for index in range(len(names))]
    compile_decisions(artifacts, pieces.policy)
    try:
        with _processes(specs):
            yield [each.url for each in where]
    finally:
        folder.clear()


@contextmanager
def _processes(specs: Sequence[ServerSpec]) -> Iterator[None]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", TOKEN_VARIABLE: generate_token()}
    with ExitStack() as stack:
        pipes = [stack.enter_context(_process(spec, environment)) for spec in specs]
        for spec, pipe in zip(specs, pipes, strict=True):
            try:
                trouble = pipe.recv()
            except EOFError:
                trouble = "it ended"
            assert not trouble, f"{spec.name}: {trouble} ({log_path(spec)})"
        yield
        for pipe in pipes:
            pipe.send("stop")


@contextmanager
def _process(spec: ServerSpec, environment: dict[str, str]) -> Iterator[Connection]:
    here, there = multiprocessing.Pipe()
    command = [sys.executable, __file__, str(there.fileno())]
    process = popen(command, env=environment, pass_fds=(there.fileno(),))
    there.close()
    here.send(spec)
    try:
        yield here
    finally:
        here.close()
        try:
            process.wait(2 * STOPPING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _serve(pipe: Connection) -> None:
    """The server that the other end of the pipe asks for, until it says so or is gone."""
    spec = pipe.recv()
    log_to_file(spec)
    process = ServerProcess(spec)
    while not (status := process.status()).ready:
        if status.phase in (Phase.FAILED, Phase.STOPPED):
            pipe.send(status.error or "stopped")
            return
        time.sleep(_LOOK_S)
    pipe.send("")
    with suppress(EOFError):
        pipe.recv()
    process.stop(STOPPING_S)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
