"""What the operator of a cluster decides, from the command line or a YAML file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trimmoe.core.choice import Choice
from trimmoe.core.errors import UserError
from trimmoe.core.precision import Precision
from trimmoe.core.private import require_secret
from trimmoe.core.sample_clusters import cluster_path
from trimmoe.core.specs import DEVICE
from trimmoe.core.yaml_file import read_yaml, shown

_HIGHEST_PORT = 65535

Port = Annotated[int, Field(ge=1, le=_HIGHEST_PORT)]
Share = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]


class ServeConfig(BaseModel):
    """Everything `trimmoe serve` may be told, with its defaults."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cluster: Path | None = None
    """A cluster file; may be left out where a plan is given, which holds its cluster."""
    model: str = "embedded"
    """A checkpoint folder, a hub id, or `embedded`. Must mean the same on every machine."""
    served_name: str | None = None
    """What requests call the model; None: its folder's name, its hub id or `embedded`."""
    profile: Path | None = None
    plan: Path | None = None
    machines: Path | None = None
    """What `trimmoe probe` measured; None: what the plan was made with, or nominal figures."""
    text: tuple[Path, ...] = ()
    """What to calibrate on where no profile is given; none: the prose that every Python carries."""
    calibration_tokens: Annotated[int, Field(ge=1)] = 20_000
    plan_iterations: Annotated[int, Field(ge=0)] = 2_000
    """Neighbours tried where no plan is given."""
    survive: Annotated[int, Field(ge=0)] = 0
    """So many servers may go, and every expert still has a host, where no plan is given."""
    policy: str | None = None
    """A preset; None: `auto`, which spends a budget if one is given, else changes nothing."""
    method: str | None = None
    """What another system would do on these machines, or an ablation of ours: placement and policy,
    by the names of `trimmoe compare`; None: ours."""
    budget: Share | None = None
    """Flip rate a token may lose; None: 0.02 under a policy that trims."""
    confidence: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.9
    api_keys: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    tls_certificate: Path | None = None
    """PEM file to serve HTTPS with, and that of its key; None: plain HTTP."""
    tls_key: Path | None = None
    tls: bool = False
    """Whether HTTP is served over TLS, each machine with a certificate of its own."""
    page: bool = True
    """Whether every server serves the page at `/`."""
    host: str | None = None
    """Where HTTP listens; None: loopback on one machine, each machine's own address on several."""
    port_base: Port = 8000
    """HTTP port of the first server on a machine; the next one's is one higher."""
    wire_port_base: Port | None = None
    """The same for links between servers. None: 100 above `port_base`; on one machine no ports, but
    sockets that only this user can reach."""
    emulate: bool | None = None
    """Whether links and computing are slowed down to what the cluster file says; None: on one
    machine, yes."""
    emulate_links: bool | None = None
    """Whether links are; None: as `emulate`."""
    emulate_machines: bool | None = None
    """Whether computing is; None: as `emulate`."""
    encrypt: bool | None = None
    """Whether links are encrypted; None: wherever they are ports."""
    kv_slots: Annotated[int, Field(ge=1, le=4096)] = 16
    """Sequences a server admits at once; each may fill the model's context."""
    prefix_cache: bool = True
    """Whether what was read of prompts and answers is kept for requests that begin alike."""
    verify_share: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    """Of the results of experts on other servers, what is computed a second time and compared."""
    draft_head: str = "auto"
    """What guesses on from the model's own states: `auto` is the one in its folder, if there is
    one; `none`, or a file on every machine."""
    draft_model: str | None = None
    """A small model of the same vocabulary that guesses too, named like the model; must mean the
    same on every machine."""
    max_waiting: Annotated[int, Field(ge=0)] = 64
    """Requests that may wait for a slot before a server refuses more."""
    device: Annotated[str, Field(pattern=f"^({DEVICE})$")] | None = None
    """What all servers compute on; None: each what the cluster file says of it."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: float32 on processors, bfloat16 on accelerators, where the mere shape of a batch may
    flip a prediction."""
    quantise: Precision = Precision.NONE
    """In how many bits weights are held and served: those of float32 on a processor."""
    threads: Annotated[int, Field(ge=1)] | None = None
    """That each server computes with; None: its share of the cores of its machine."""
    patience: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 60.0
    """How long a request waits for a server that it cannot do without, in seconds."""
    spare: bool = True
    """Whether each machine keeps the process that forks servers, for those that die."""
    ready_s: Annotated[float, Field(gt=0)] = 600.0
    """How long starting may take, in seconds."""

    @property
    def planned_dtype(self) -> str:
        """What is calibrated and planned with."""
        return "float32" if self.dtype == "auto" else self.dtype

    @property
    def choice(self) -> Choice:
        """What is run, and at what quality."""
        return Choice(
            method=self.method or self.policy or "auto",
            budget=self.budget,
            confidence=self.confidence,
            quantise=self.quantise,
        )

    @property
    def first_wire_port(self) -> int:
        return self.port_base + 100 if self.wire_port_base is None else self.wire_port_base


def serve_config(
    path: Path | None,
    given: dict[str, Any],
    *,
    default_cluster: Callable[[ServeConfig], Path] | None = None,
    open_to_all: bool = False,
) -> ServeConfig:
    """The settings of a YAML file, overridden by those `given` that are not None.

    Paths in the file are relative to it. Where neither says which servers there are,
    `default_cluster` does, unless it is
    `open_to_all`. Raises `UserError` naming the key that is wrong.
    """
    content = {} if path is None else _read(path)
    if path is not None and content.get("api_keys"):
        require_secret(path, "API keys")
    chosen = content | {name: value for name, value in given.items() if value is not None}
    try:
        config = ServeConfig.model_validate(chosen)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(step) for step in first["loc"]).replace("_", "-")
        raise UserError(
            f"The setting `{key}` is {shown(first['input'])} ({first['msg'].lower()}); correct it."
        ) from error
    if (config.tls_certificate is None) != (config.tls_key is None):
        raise UserError(
            "TLS needs a certificate and its key; give --tls-certificate and --tls-key."
        )
    if config.tls_certificate is not None:
        config = config.model_copy(update={"tls": True})
    if config.method is not None and config.policy is not None:
        raise UserError("A method has a policy of its own; give --method or --policy.")
    if config.survive and (config.plan or config.method):
        raise UserError(
            "--survive is for plans that are made here; leave out --plan and --method, or plan "
            "with `trimmoe plan --survive`."
        )
    if config.cluster is None and config.plan is None and not open_to_all:
        if default_cluster is None:
            raise UserError("Nothing says which servers there are; give --cluster or --plan.")
        return config.model_copy(update={"cluster": default_cluster(config)})
    if config.cluster is not None:
        return config.model_copy(update={"cluster": cluster_path(config.cluster)})
    return config


_PATHS = ("cluster", "profile", "plan", "machines", "tls_certificate", "tls_key")


def _beside(path: Path, key: str, given: str) -> Path:
    """A file named in the settings at `path`, or the sample cluster of that name."""
    named = cluster_path(Path(given)) if key == "cluster" else Path(given)
    file = path.parent / given
    return file if file.is_file() or not named.is_absolute() else named


def _read(path: Path) -> dict[str, Any]:
    try:
        content = read_yaml(path, "settings")
    except FileNotFoundError as error:
        raise UserError(f"There are no settings at {path}; check --config.") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must be a mapping such as `port_base: 8000`; write it so.")
    content = {str(key).replace("-", "_"): value for key, value in content.items()}
    for key in _PATHS:
        if isinstance(content.get(key), str):
            content[key] = _beside(path, key, content[key])
    if isinstance(content.get("text"), list):
        content["text"] = [path.parent / str(each) for each in content["text"]]
    return content
