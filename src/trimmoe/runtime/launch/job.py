"""From what the operator wants to one description per server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from trimmoe.policy.build import PolicyMaker
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.launch.addresses import Endpoint, is_loopback
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.model import served_name
from trimmoe.runtime.launch.nodes import real_node
from trimmoe.runtime.launch.server import NodeFactory, ServerSpec
from trimmoe.runtime.service import InferenceService


@dataclass(frozen=True, kw_only=True, slots=True)
class Pieces:
    """What comes from the layers above the runtime, as names that can be sent to a process."""

    policy: PolicySettings
    app: Callable[[InferenceService], Any]
    """Makes the ASGI app around a service."""
    node: NodeFactory = real_node
    maker: PolicyMaker | None = None
    """Makes another policy than that of `policy`."""
    title: str = ""
    """What is said to be served; empty: the policy's name."""


def server_specs(
    config: ServeConfig,
    artifacts: Artifacts,
    pieces: Pieces,
    endpoints: Sequence[Endpoint],
    *,
    one_machine: bool,
) -> list[ServerSpec]:
    """One spec per server of the plan, in its order."""
    emulate, encrypt = config.emulate, config.encrypt
    if emulate is None:
        emulate = one_machine
    links, machines = config.emulate_links, config.emulate_machines
    if encrypt is None:
        encrypt = not all(is_loopback(each.machine) for each in endpoints)
    return [
        ServerSpec(
            index=index,
            endpoints=tuple(endpoints),
            model=config.model,
            served_name=config.served_name or served_name(config.model),
            device=config.device or artifacts.plan.cluster.device(index),
            dtype=config.dtype,
            profile=artifacts.profile,
            plan=artifacts.plan,
            policy=pieces.policy,
            maker=pieces.maker,
            title=pieces.title or pieces.policy.name,
            kv_slots=config.kv_slots,
            max_waiting=config.max_waiting,
            quantise=config.quantise,
            threads=config.threads,
            emulate_links=emulate if links is None else links,
            emulate_machines=emulate if machines is None else machines,
            encrypt=encrypt,
            app=pieces.app,
            node=pieces.node,
        )
        for index in range(len(endpoints))
    ]
