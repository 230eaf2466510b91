"""What a back end shows to people who watch it: servers, links, routes and requests at one moment.

Plain values that are written down as JSON as they are; names end with their units. M servers, N
layers, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

from trimmoe.core.specs import BoolArray

if TYPE_CHECKING:
    from trimmoe.core.plan import Plan
    from trimmoe.core.specs import ModelSpec
    from trimmoe.policy.settings import PolicySettings

MOST_REQUESTS = 50
"""That are shown one by one."""


class State(StrEnum):
    """How a server is, as far as another one can tell."""

    UP = "up"
    STARTING = "starting"
    """Its process can be reached and has said nothing of itself yet: it starts, mostly again."""
    LOST = "lost"
    """It cannot be reached."""
    LEFT_OUT = "left-out"
    """It gave wrong results and is not asked any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """What one server holds."""

    name: str
    experts: tuple[tuple[int, ...], ...]
    """By layer."""
    expert_bytes: int
    """Of those."""
    room_bytes: int
    """What the plan leaves for experts, C_m of (c.1)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What does not change while a plan is served."""

    layers: int
    experts: int
    """Of each layer."""
    top_k: int
    dense_bytes: int
    """What every server holds besides its experts."""
    servers: tuple[Held, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerPicture:
    """One server; figures are 0 where it is not up."""

    state: State
    busy: float = 0.0
    """Share of the time that it computed lately, 0..1."""
    waiting_s: float = 0.0
    """How long work for tokens waits there before it is begun."""
    queued: int = 0
    """Pieces of work that wait now."""
    kv_usage: float = 0.0
    """Share of the places for sequences that is taken, 0..1."""
    running: int = 0
    """Answers to its users that are under way."""
    tokens: int = 0
    """That its users were given since it started."""
    memory_bytes: int = 0
    """What its process takes: on an accelerator there, else of the machine's memory."""
    uptime_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkPicture:
    """One directed link; None where nothing is measured yet."""

    source: int
    destination: int
    delay_s: float | None
    """Measured, one way."""
    planned_delay_s: float
    """What the cluster file says."""
    bandwidth_bytes_per_s: float | None
    sent_bytes: int | None
    """Since its source started."""
    up: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestPicture:
    """One request of this server's users."""

    state: str
    """`waiting` for a place, `reading` its prompt, or `answering`."""
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, not read again."""
    tokens: int
    """Of the answer so far."""
    most_tokens: int
    age_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyPicture:
    """What is decided with."""

    name: str
    budget: float
    """D-bar of requests that ask for none."""
    confidence: float
    trims: bool
    """Whether it leaves out, replaces or lets pass anything where the budget allows it."""
    guesses: int
    """Tokens that may be guessed ahead."""
    guessing: bool
    """Whether guesses are worth their time now."""
    guesses_made: int = 0
    """So far, for this server's users."""
    guesses_right: int = 0
    engines_built: int = 0
    """How often the cluster's changes were taken up since this server started."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """All of it."""

    server: int
    """The one that was asked."""
    ok: bool
    reason: str
    """Why not."""
    layout: Layout
    servers: tuple[ServerPicture, ...]
    links: tuple[LinkPicture, ...]
    routes: tuple[tuple[int, ...] | None, ...]
    """By access server, the server of each layer, for requests that come now; None for those that
    are not up."""
    policy: PolicyPicture
    requests: tuple[RequestPicture, ...]
    """The oldest `MOST_REQUESTS`."""
    running: int
    waiting: int


def policy_picture(settings: PolicySettings, *, guessing: bool, **counts: int) -> PolicyPicture:
    """Of a policy; `counts` are of the fields with defaults."""
    levers = settings.levers
    final = levers.exit and not settings.drafts
    return PolicyPicture(
        name=settings.name,
        budget=settings.budget,
        confidence=settings.confidence,
        trims=levers.substitute or levers.drop_slots or levers.skip or final or settings.relaxed,
        guesses=settings.guesses,
        guessing=guessing,
        **counts,
    )


def layout_of(spec: ModelSpec, plan: Plan) -> Layout:
    """Who holds what under a plan."""
    servers = tuple(
        Held(
            name=name,
            experts=_by_layer(hosts),
            expert_bytes=int(spec.expert_bytes[hosts].sum()),
            room_bytes=int(room),
        )
        for name, hosts, room in zip(
            plan.cluster.server_names, plan.hosts, plan.expert_capacity_bytes, strict=True
        )
    )
    return Layout(
        layers=spec.layer_count,
        experts=spec.expert_count,
        top_k=spec.top_k,
        dense_bytes=spec.dense_bytes,
        servers=servers,
    )


def whole_layout(spec: ModelSpec, name: str) -> Layout:
    """One server that holds everything."""
    everything = np.ones((spec.layer_count, spec.expert_count), dtype=bool)
    size = spec.total_expert_bytes
    held = Held(name=name, experts=_by_layer(everything), expert_bytes=size, room_bytes=size)
    return Layout(
        layers=spec.layer_count,
        experts=spec.expert_count,
        top_k=spec.top_k,
        dense_bytes=spec.dense_bytes,
        servers=(held,),
    )


def _by_layer(hosts: BoolArray) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(np.flatnonzero(layer).tolist()) for layer in hosts)
