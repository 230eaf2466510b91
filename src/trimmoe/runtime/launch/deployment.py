"""What a head and the machines that join it tell each other; data only, nothing that runs."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec

from trimmoe.core.errors import UserError
from trimmoe.core.plan import Plan, load_plan
from trimmoe.core.profile import Profile, load_profile
from trimmoe.runtime.launch.addresses import Endpoint, endpoints
from trimmoe.runtime.launch.artifacts import Artifacts, model_spec_of
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.status import Phase, ServerStatus
from trimmoe.runtime.wire.keys import KeyPair, derive_keys

DEFAULT_PORT = 7900
"""Where a head waits for machines that join."""
_HEAD, _MEMBER = "/head", "/member"
"""No servers: those have no slash in their names."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`ServerStatus` of one server of a member."""

    name: str
    phase: str
    pid: int
    error: str
    healthy: bool
    reason: str

    @staticmethod
    def of(name: str, status: ServerStatus) -> Report:
        return Report(
            name=name,
            phase=status.phase.value,
            pid=status.pid,
            error=status.error,
            healthy=status.healthy,
            reason=status.reason,
        )

    @property
    def status(self) -> ServerStatus:
        """Raises `ValueError` for a phase that there is not."""
        return ServerStatus(
            phase=Phase(self.phase),
            pid=self.pid,
            error=self.error,
            healthy=self.healthy,
            reason=self.reason,
        )


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A member's word, every second: who it is and how its servers are."""

    version: str
    """Of its TrimMoE."""
    servers: tuple[str, ...]
    address: str
    """Where the other machines reach it."""
    runs: str = ""
    """The deployment that its servers are of; empty: none."""
    error: str = ""
    """Why they could not be started."""
    reports: tuple[Report, ...] = ()


class Deployment(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All that a machine needs to start its servers, now and after the head has gone."""

    config: bytes
    """A `ServeConfig` as JSON; it names no files."""
    profile: bytes
    plan: bytes
    """Artifacts as files."""
    machines: dict[str, str]
    """The address of each server's machine, in the plan's order."""

    @property
    def identity(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for part in (self.config, self.profile, self.plan, repr(self.machines).encode()):
            digest.update(len(part).to_bytes(8, "big") + part)
        return digest.hexdigest()


class Heard(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The head has heard a member; it runs what it should, or there is nothing to run yet."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A member must go."""

    reason: str


class End(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The operator ended the cluster at the head."""


ToHead = Hello
ToMember = Deployment | Heard | Refused | End
encode = msgspec.msgpack.Encoder().encode
decode_to_head = msgspec.msgpack.Decoder(ToHead).decode
decode_to_member = msgspec.msgpack.Decoder(ToMember).decode


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A deployment, read."""

    config: ServeConfig
    artifacts: Artifacts
    endpoints: tuple[Endpoint, ...]


def deployment_of(
    config: ServeConfig, artifacts: Artifacts, machines: dict[str, str]
) -> Deployment:
    """What members are sent; `machines` as in `Deployment`."""
    without_files = config.model_copy(
        update={"cluster": None, "profile": None, "plan": None, "machines": None, "text": ()}
    )
    return Deployment(
        config=without_files.model_dump_json().encode(),
        profile=_as_file(artifacts.profile),
        plan=_as_file(artifacts.plan),
        machines=machines,
    )


def _as_file(artifact: Profile | Plan) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "artifact"
        artifact.save(path)
        return path.read_bytes()


def open_deployment(deployment: Deployment, folder: Path) -> Opened:
    """Its parts, kept in `folder`; raises `UserError` if they do not fit the software here."""
    try:
        config = ServeConfig.model_validate_json(deployment.config)
    except ValueError as error:
        raise UserError(
            f"The head's settings are not this version's ({error}); install the same version of "
            "TrimMoE on both."
        ) from error
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (("profile.trim", deployment.profile), ("plan.trim", deployment.plan)):
        (folder / name).write_bytes(content)
    plan = load_plan(folder / "plan.trim")
    return Opened(
        config=config,
        artifacts=Artifacts(
            profile=load_profile(folder / "profile.trim"), plan=plan, model=model_spec_of(config)
        ),
        endpoints=deployed_endpoints(config, plan.cluster.server_names, deployment.machines),
    )


def deployed_endpoints(
    config: ServeConfig, names: tuple[str, ...], machines: dict[str, str]
) -> tuple[Endpoint, ...]:
    """Where the servers of several machines listen. Raises `UserError`."""
    return endpoints(
        names,
        machines,
        http_host=config.host,
        port_base=config.port_base,
        wire_port_base=config.first_wire_port,
    )


def head_keys(token: str) -> KeyPair:
    """The head's: who does not have the token cannot even address it. Raises `UserError`."""
    return derive_keys(token, _HEAD)


def member_keys(token: str) -> KeyPair:
    """Those of all members. Raises `UserError`."""
    return derive_keys(token, _MEMBER)
