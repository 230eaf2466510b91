"""`trimmoe serve`: the runtime's launcher with the policies and the HTTP side put in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rich.console import Console

from trimmoe.api.app import create_app
from trimmoe.api.settings import ApiSettings
from trimmoe.core.choice import Choice
from trimmoe.core.errors import UserError
from trimmoe.experiments.joining import JoinedPlanner
from trimmoe.experiments.method_engines import plan_for
from trimmoe.experiments.methods import chosen, find_method, served
from trimmoe.experiments.opening import require_guesses
from trimmoe.experiments.preparation import prepare
from trimmoe.experiments.sample_text import sample_text
from trimmoe.placement.make import as_published
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.launch.artifacts import Artifacts, cluster_of
from trimmoe.runtime.launch.config import ServeConfig
from trimmoe.runtime.launch.deployment import DEFAULT_PORT, deployed_endpoints
from trimmoe.runtime.launch.job import Pieces
from trimmoe.runtime.launch.join import serve_join
from trimmoe.runtime.launch.local import local_endpoints, require_startable, serve_local
from trimmoe.runtime.launch.naming import cluster_token, own_address, own_name
from trimmoe.runtime.launch.openings import Opening, head_openings, local_openings
from trimmoe.runtime.launch.several import HeadOptions, serve_head
from trimmoe.runtime.launch.tls import Tls, tls_of
from trimmoe.runtime.launch.whoever import Roll, serve_whoever_joins

Say = Callable[[str], None]
POLICIES = tuple(name for name in PRESETS if name != "paper")
"""What servers can run on any plan; `paper` moves tokens without their KV cache, which no real ones
can do."""


def pieces_of(config: ServeConfig) -> Pieces:
    """The policy and the app that `config` asks for. Raises `UserError`."""
    pieces = _pieces_of(config)
    if config.draft_model is not None:
        require_guesses(pieces.policy)
    return pieces


def _pieces_of(config: ServeConfig) -> Pieces:
    app = partial(create_app, settings=ApiSettings(api_keys=config.api_keys, page=config.page))
    if config.method is None:
        return Pieces(policy=_policy(config.choice), app=app)
    method = find_method(config.method)
    policy = served(config.choice)
    return Pieces(policy=policy, app=app, maker=method.policy, title=method.title)


def artifacts_of(config: ServeConfig, say: Say) -> Artifacts:
    """Profile and plan; where a method is asked for, the plan that is its own on these machines.

    Raises `UserError` where it cannot place the model.
    """
    if config.method is None:
        return prepare(config, sample=_sample, say=say)
    method = find_method(config.method)
    placed = None if method.seed is None else as_published(method.seed)
    found = prepare(config, sample=_sample, say=say, placed=placed)
    plan = plan_for(method, found.plan, found.profile, found.model)
    if config.plan is not None and method.seed is not None:
        say(f"{method.title} places the experts itself; of the plan only the machines are used.")
    return replace(found, plan=plan)


def serve_here(config: ServeConfig, say: Say, *, pieces: Pieces | None = None) -> None:
    """All servers on this machine, until Ctrl-C. Raises `UserError`."""
    pieces = pieces or pieces_of(config)
    # What can be refused at once is refused before minutes of calibration.
    require_startable(config, cluster_of(config).server_names)
    serve_local(config, artifacts_of(config, say), pieces, say)


def openings_here(config: ServeConfig) -> tuple[Opening, ...]:
    """What `serve_here` would open. Raises `UserError`."""
    return local_openings(config, local_endpoints(config, cluster_of(config).server_names))


def openings_of_head(config: ServeConfig, options: HeadOptions) -> tuple[Opening, ...]:
    """What `serve_as_head` would open on this machine. Raises `UserError`."""
    names = options.servers
    if config.cluster is not None or config.plan is not None:
        names = cluster_of(config).server_names
        _require_known(options.servers, names)
    machines = dict.fromkeys(options.servers, options.address)
    own = deployed_endpoints(config, tuple(n for n in names if n in machines), machines, 0)
    indexed = [(names.index(each.name), each) for each in own]
    return head_openings(config, indexed, options.address, options.port)


def _require_known(servers: Sequence[str], names: Sequence[str]) -> None:
    unknown = [server for server in servers if server not in names]
    if unknown:
        raise UserError(
            f"There is no server `{unknown[0]}` in the cluster; choose from {', '.join(names)}."
        )


def serve_as_head(
    config: ServeConfig,
    say: Say,
    console: Console,
    *,
    options: HeadOptions,
    count: int | None,
    replan: bool,
) -> None:
    """The first machine of several, which others join, until Ctrl-C. Raises `UserError`."""
    pieces = pieces_of(config)
    tls_of(config.tls_certificate, config.tls_key)
    named = None if config.cluster is None and config.plan is None else cluster_of(config)
    names = () if named is None else named.server_names
    if named is None and count is None:
        raise UserError(
            "Nothing says which servers there are; give --servers with their number, or "
            "--cluster or --plan."
        )
    if named is not None:
        _require_known(options.servers, names)
    if named is not None and not (replan and _is_open(config)):
        serve_head(config, artifacts_of(config, say), pieces, say, options)
        return
    roll = Roll(own=options.servers, named=names, count=count or len(names))
    if roll.count <= config.survive:
        raise UserError(
            f"To survive the loss of {config.survive} it takes {config.survive + 1} servers; raise "
            "--servers."
        )
    planner = JoinedPlanner(config, say, console, named)
    serve_whoever_joins(config, planner, pieces_of, say, options, roll=roll, replan=replan)


def _is_open(config: ServeConfig) -> bool:
    """Whether nothing says what the plan is, by which figures or for which method it is made."""
    return not (config.plan or config.machines or config.method)


def serve_as_joined(
    head: str,
    say: Say,
    *,
    servers: Sequence[str],
    token_file: Path | None,
    tls: Tls | None = None,
) -> None:
    """A machine that joins a head, until Ctrl-C. Raises `UserError`."""
    token = cluster_token(token_file)
    serve_join(head, servers=servers, token=token, say=say, assemble=pieces_of, tls=tls)


def head_options(
    *,
    address: str | None,
    port: int | None,
    servers: Sequence[str],
    token_file: Path | None,
    named: bool,
) -> HeadOptions:
    """What a head is told, and what it finds out; `named`: a file names its servers. Raises
    `UserError`."""
    own = tuple(servers) or (() if named else (own_name(),))
    return HeadOptions(
        address=address or own_address(),
        port=DEFAULT_PORT if port is None else port,
        servers=own,
        token=cluster_token(token_file),
    )


def _policy(choice: Choice) -> PolicySettings:
    if choice.method not in POLICIES:
        raise UserError(
            f"There is no policy `{choice.method}` to serve with; choose from "
            f"{', '.join(POLICIES)}, or give --method."
        )
    _, policy = chosen(choice)
    return policy


def _sample() -> str:
    return sample_text("calibration")
