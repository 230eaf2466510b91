"""From what the operator wants to one description per server."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.policy.build import PolicyMaker
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.launch.addresses import Endpoint
from trimmoe.runtime.launch.artifacts import Artifacts
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.model import served_name
from trimmoe.runtime.launch.nodes import real_node
from trimmoe.runtime.launch.note import Note
from trimmoe.runtime.launch.server import NodeFactory, ServerSpec
from trimmoe.runtime.launch.tls import Tls
from trimmoe.runtime.service import InferenceService
from trimmoe.runtime.wire.protocol import WIRE_VERSION


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What the servers of one machine are, complete: whoever has it can start any of them again."""

    spec: ServerSpec
    """Of any server of the cluster; the others differ by their index."""
    here: tuple[int, ...]
    """Those that run on this machine."""
    token: str = field(repr=False)
    import_path: tuple[str, ...]
    """Where their processes find what they import."""
    spare: bool = True
    """Whether the process that forks servers stays, for those that die."""

    def spec_of(self, index: int) -> ServerSpec:
        return replace(self.spec, index=index)

    def note(self) -> Note:
        """What another version of this software is told of it."""
        spec = self.spec
        same = (
            spec.endpoints,
            spec.model,
            spec.profile.hash,
            spec.plan.hash,
            spec.quantise.value,
            spec.device,
            spec.dtype,
            spec.title,
            spec.encrypt,
        )
        return Note(
            version=spec.version,
            wire=WIRE_VERSION.major,
            cluster=hashlib.blake2b(repr((self.here, same)).encode(), digest_size=16).hexdigest(),
            token=self.token,
        )

    @property
    def identity(self) -> str:
        """Equal where the same servers would be started: all but the token."""
        digest = hashlib.blake2b(repr(self.here).encode(), digest_size=16)
        for each in fields(self.spec):
            if each.name != "index":
                digest.update(each.name.encode() + _identified(getattr(self.spec, each.name)))
        return digest.hexdigest()


def _identified(value: Any) -> bytes:
    if isinstance(value, Profile | Plan):
        return value.hash.encode()
    # What is imported by name has no other lasting sign; all else says what it is.
    imported = callable(value) or isinstance(value, NodeFactory)
    return pickle.dumps(value) if imported else repr(value).encode()


def server_spec(
    config: ServeConfig,
    artifacts: Artifacts,
    pieces: Pieces,
    endpoints: Sequence[Endpoint],
    *,
    one_machine: bool,
    tls: Tls | None,
) -> ServerSpec:
    """The spec of the plan's first server; `tls` is this machine's."""
    emulate, encrypt = config.emulate, config.encrypt
    if emulate is None:
        emulate = one_machine
    links, machines = config.emulate_links, config.emulate_machines
    if encrypt is None:
        # Loopback too: whoever has an account on the machine can connect to its ports.
        encrypt = not all(each.link for each in endpoints)
    return ServerSpec(
        index=0,
        endpoints=tuple(endpoints),
        model=config.model,
        served_name=config.served_name or served_name(config.model),
        device=config.device,
        dtype=config.dtype,
        profile=artifacts.profile,
        plan=artifacts.plan,
        policy=pieces.policy,
        maker=pieces.maker,
        title=pieces.title or pieces.policy.name,
        kv_slots=config.kv_slots,
        max_waiting=config.max_waiting,
        patience_s=config.patience,
        prefix_cache=config.prefix_cache,
        verify_share=config.verify_share,
        draft_head=config.draft_head,
        draft_model=config.draft_model,
        quantise=config.quantise,
        threads=config.threads,
        emulate_links=emulate if links is None else links,
        emulate_machines=emulate if machines is None else machines,
        encrypt=encrypt,
        tls=tls,
        app=pieces.app,
        node=pieces.node,
    )
