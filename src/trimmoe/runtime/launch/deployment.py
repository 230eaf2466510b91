"""What a head and the machines that join it tell each other; data only, nothing that runs."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import trimmoe
from trimmoe.core.errors import UserError
from trimmoe.core.machines import BATCHES, Work
from trimmoe.core.plan import Plan, load_plan
from trimmoe.core.profile import Profile, load_profile
from trimmoe.runtime.launch.addresses import Endpoint, endpoints
from trimmoe.runtime.launch.artifacts import Artifacts, model_spec_of
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.status import Phase, ServerStatus
from trimmoe.runtime.machine_report import LinkReport, MachineReport
from trimmoe.runtime.wire.keys import KeyPair, derive_keys

DEFAULT_PORT = 7900
"""Where a head waits for machines that join."""
TURN_PORTS = 50
"""Between the ports that servers have for one another in one turn and in the other."""
_HEAD, _MEMBER = "/head", "/member"
"""No servers: those have no slash in their names."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """`ServerStatus` of one server of a member."""

    deployment: str
    name: str
    phase: str
    pid: int
    error: str = ""
    healthy: bool = False
    reason: str = ""
    under_way: int = 0
    """Requests that are answered or wait."""
    links: tuple[LinkReport, ...] = ()

    @staticmethod
    def of(deployment: str, name: str, status: ServerStatus) -> Report:
        return Report(
            deployment=deployment,
            name=name,
            phase=status.phase.value,
            pid=status.pid,
            error=status.error,
            healthy=status.healthy,
            reason=status.reason,
            under_way=status.running + status.waiting,
            links=status.links,
        )

    @staticmethod
    def failed(deployment: str, name: str, error: str) -> Report:
        return Report(
            deployment=deployment, name=name, phase=Phase.FAILED.value, pid=0, error=error
        )

    @property
    def status(self) -> ServerStatus | None:
        """None for a phase that there is not."""
        try:
            phase = Phase(self.phase)
        except ValueError:
            return None
        return ServerStatus(
            phase=phase,
            pid=self.pid,
            error=self.error,
            healthy=self.healthy,
            reason=self.reason,
            running=self.under_way,
            links=self.links,
        )


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """A server is to time itself."""

    server: str
    deployment: str
    number: int
    """Tells wishes apart."""


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a wish; `MachineReport` in plain numbers, None if it failed."""

    number: int
    report: dict[str, Any] | None


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A member's word, every second: who it is and how its servers are."""

    version: str
    """Of its TrimMoE."""
    wire: int = 1
    """Major version of the protocol that its servers speak with others."""
    servers: tuple[str, ...]
    address: str
    """Where the other machines reach it."""
    memory_bytes: int
    """Free when it joined."""
    cores: int
    runs: tuple[str, ...] = ()
    """The deployments that it has begun and not ended."""
    reports: tuple[Report, ...] = ()
    timed: tuple[Timed, ...] = ()


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    """All that a machine needs to start its servers, now and after the head has gone."""

    config: bytes
    """A `ServeConfig` as JSON; it names no files."""
    profile: bytes
    plan: bytes
    """Artifacts as files."""
    machines: dict[str, str]
    """The address of each server's machine, in the plan's order."""
    turn: int = 0
    """0 or 1: the next one to be served has the other, and other ports between servers."""

    @property
    def identity(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        told = repr((self.machines, self.turn)).encode()
        for part in (self.config, self.profile, self.plan, told):
            digest.update(len(part).to_bytes(8, "big") + part)
        return digest.hexdigest()


class Wanted(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The head has heard a member, and says what it is to run."""

    known: bool
    """Whether the head knows that yet; if not, all stays as it is."""
    deployments: tuple[str, ...] = ()
    """All others are to retire."""
    fresh: Deployment | None = None
    """One of those that the member does not have."""
    wishes: tuple[Wish, ...] = ()


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A member must go."""

    reason: str


class End(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The operator ended the cluster at the head."""


ToHead = Hello
ToMember = Wanted | Refused | End
encode = msgspec.msgpack.Encoder().encode
_to_head = msgspec.msgpack.Decoder(ToHead)
_to_member = msgspec.msgpack.Decoder(ToMember)
_deployment = msgspec.msgpack.Decoder(Deployment)


def decode_to_head(content: bytes) -> ToHead | None:
    """A member's word; None for what is none."""
    return _decoded(_to_head, content)


def decode_to_member(content: bytes) -> ToMember | None:
    """The head's word; None for what is none."""
    return _decoded(_to_member, content)


def decode_deployment(content: bytes) -> Deployment | None:
    """What was kept; None for what is none, or another version's."""
    return _decoded(_deployment, content)


def _decoded(decoder: msgspec.msgpack.Decoder[Any], content: bytes) -> Any:
    try:
        return decoder.decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError):
        return None


def timed_of(number: int, report: MachineReport | None) -> Timed:
    """A report in plain numbers."""
    plain = None
    if report is not None:
        links = [msgspec.to_builtins(link) for link in report.links]
        rest = {each.name: getattr(report, each.name) for each in fields(report)}
        plain = rest | {"work_s": report.work_s.tolist(), "links": links}
    return Timed(number=number, report=plain)


def report_of(timed: Timed) -> MachineReport | None:
    """The report again; None if there is none, or it makes no sense."""
    if timed.report is None:
        return None
    try:
        work_s = np.array(timed.report["work_s"], dtype=float)
        links = msgspec.convert(timed.report["links"], tuple[LinkReport, ...])
        report = MachineReport(**timed.report | {"work_s": work_s, "links": links})
    except (KeyError, TypeError, ValueError, msgspec.ValidationError):
        return None
    return report if work_s.shape == (3, len(Work), len(BATCHES)) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Opened:
    """A deployment, read."""

    config: ServeConfig
    artifacts: Artifacts
    endpoints: tuple[Endpoint, ...]


def deployment_of(
    config: ServeConfig, artifacts: Artifacts, machines: dict[str, str], turn: int = 0
) -> Deployment:
    """What members are sent; `machines` and `turn` as in `Deployment`."""
    return Deployment(
        config=settings_of(config),
        profile=_as_file(artifacts.profile),
        plan=_as_file(artifacts.plan),
        machines=machines,
        turn=turn,
    )


_FILES = ("cluster", "profile", "plan", "machines", "tls_certificate", "tls_key")
"""Of a config, which mean nothing on another machine."""


def settings_of(config: ServeConfig) -> bytes:
    """A config as members are sent it."""
    without_files = config.model_copy(update=dict.fromkeys(_FILES) | {"text": ()})
    # What is as it always is need not be known to a member of another version.
    return without_files.model_dump_json(exclude_defaults=True).encode()


def same_settings(deployment: Deployment, config: ServeConfig) -> bool:
    """Whether a deployment, perhaps of another version's head, is of these settings."""
    try:
        known = ServeConfig.model_validate_json(deployment.config)
    except ValueError:
        return False
    return settings_of(known) == settings_of(config)


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
            f"The head uses settings that TrimMoE {trimmoe.__version__} does not have ({error}); "
            "install the head's version here."
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
        endpoints=deployed_endpoints(
            config, plan.cluster.server_names, deployment.machines, deployment.turn
        ),
    )


def deployed_endpoints(
    config: ServeConfig, names: tuple[str, ...], machines: dict[str, str], turn: int
) -> tuple[Endpoint, ...]:
    """Where the servers of several machines listen. Raises `UserError`."""
    return endpoints(
        names,
        machines,
        http_host=config.host,
        port_base=config.port_base,
        wire_port_base=config.first_wire_port + turn * TURN_PORTS,
        tls=config.tls,
    )


def head_keys(token: str) -> KeyPair:
    """The head's: who does not have the token cannot even address it. Raises `UserError`."""
    return derive_keys(token, _HEAD)


def member_keys(token: str) -> KeyPair:
    """Those of all members. Raises `UserError`."""
    return derive_keys(token, _MEMBER)
