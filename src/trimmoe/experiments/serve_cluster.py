"""`trimmoe serve`: the runtime's launcher with the policies and the HTTP side put in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from trimmoe.api.app import create_app
from trimmoe.api.settings import ApiSettings
from trimmoe.core.errors import UserError
from trimmoe.experiments.methods import configured, find_method
from trimmoe.experiments.sample_text import sample_text
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.launch.addresses import require_free
from trimmoe.runtime.launch.artifacts import cluster_of, prepare
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.job import Pieces
from trimmoe.runtime.launch.local import local_endpoints, serve_local
from trimmoe.runtime.launch.raylet import DEFAULT_PORT
from trimmoe.runtime.launch.several import cluster_token, own_address, serve_head, serve_join

Say = Callable[[str], None]
POLICIES = (
    "trimmoe", "guessing", "lossless", "speculative", "final-exits", "substitute-only", "exact",
)  # fmt: skip
"""Those of `methods` that are a policy on any plan; `paper` moves tokens without their KV cache,
which no real servers can do."""


def pieces_of(config: ServeConfig) -> Pieces:
    """The policy and the app that `config` asks for. Raises `UserError`."""
    return Pieces(
        policy=_policy(config),
        app=partial(create_app, settings=ApiSettings(api_keys=config.api_keys)),
    )


def serve_here(config: ServeConfig, say: Say, *, pieces: Pieces | None = None) -> None:
    """All servers on this machine, until Ctrl-C. Raises `UserError`."""
    pieces = pieces or pieces_of(config)
    # What can be refused at once is refused before minutes of calibration.
    require_free(local_endpoints(config, cluster_of(config).server_names))
    serve_local(config, prepare(config, sample=_sample, say=say), pieces, say)


def serve_as_head(
    config: ServeConfig,
    say: Say,
    *,
    address: str | None,
    ray_port: int | None,
    servers: Sequence[str],
    token_file: Path | None,
    pieces: Pieces | None = None,
) -> None:
    """The first machine of several, which others join, until Ctrl-C. Raises `UserError`."""
    pieces, token = pieces or pieces_of(config), cluster_token(token_file)
    names = cluster_of(config).server_names
    unknown = [server for server in servers if server not in names]
    if unknown:
        raise UserError(
            f"There is no server `{unknown[0]}` in the cluster; choose from {', '.join(names)}."
        )
    serve_head(
        config,
        prepare(config, sample=_sample, say=say),
        pieces,
        say,
        address=address or own_address(),
        port=DEFAULT_PORT if ray_port is None else ray_port,
        servers=servers,
        token=token,
    )


def serve_as_joined(
    head: str, say: Say, *, ray_port: int | None, servers: Sequence[str], token_file: Path | None
) -> None:
    """A machine that joins a head, until Ctrl-C. Raises `UserError`."""
    serve_join(
        head,
        port_base=DEFAULT_PORT if ray_port is None else ray_port,
        servers=servers,
        token=cluster_token(token_file),
        say=say,
    )


def _policy(config: ServeConfig) -> PolicySettings:
    name = config.policy_in_force
    if name not in POLICIES:
        raise UserError(
            f"There is no policy `{name}` to serve with; choose from {', '.join(POLICIES)}."
        )
    budget = config.budget_in_force
    return configured(find_method(name), budget=budget, confidence=config.confidence)


def _sample() -> str:
    return sample_text("calibration")
