"""What a server shows of the cluster, from what it is told and measures itself."""

from __future__ import annotations

from trimmoe.runtime.node.parts import Parts
from trimmoe.runtime.node.records.messages import LoadReport, Vitals
from trimmoe.runtime.picture import (
    LinkPicture,
    Picture,
    PolicyPicture,
    ServerPicture,
    State,
    policy_picture,
)

_NOTHING = Vitals(0, 0, 0, 0.0, [])


def picture_of(parts: Parts) -> Picture:
    """Everything at this moment; costs nothing but the writing down."""
    health, front_end, planner = parts.health(), parts.front_end, parts.planner
    servers = range(len(parts.layout.servers))
    states = [_state(parts, server) for server in servers]
    built = planner.in_force
    return Picture(
        server=parts.server,
        ok=health.ok,
        reason=health.reason,
        layout=parts.layout,
        servers=tuple(
            _server(state, planner.load_of(server))
            for server, state in zip(servers, states, strict=True)
        ),
        links=tuple(
            _link(parts, source, destination, states)
            for source in servers
            for destination in servers
            if source != destination
        ),
        routes=tuple(
            built.route_of(server) if state is State.UP else None
            for server, state in zip(servers, states, strict=True)
        ),
        policy=_policy(parts),
        requests=tuple(front_end.under_way()),
        running=front_end.running,
        waiting=front_end.waiting,
    )


def _state(parts: Parts, server: int) -> State:
    if server in parts.jury.left_out:
        return State.LEFT_OUT
    if server in parts.planner.lost:
        return State.LOST
    return State.STARTING if parts.planner.load_of(server) is None else State.UP


def _server(state: State, load: LoadReport | None) -> ServerPicture:
    if load is None or state is not State.UP:
        return ServerPicture(state=state)
    vitals = load.vitals or _NOTHING
    return ServerPicture(
        state=state,
        busy=load.busy,
        waiting_s=load.waiting_s,
        queued=vitals.queued,
        kv_usage=load.kv_usage,
        running=load.running,
        tokens=vitals.tokens,
        memory_bytes=vitals.memory_bytes,
        uptime_s=vitals.uptime_s,
    )


def _link(parts: Parts, source: int, destination: int, states: list[State]) -> LinkPicture:
    load = parts.planner.load_of(source)
    vitals = None if load is None else load.vitals
    up = not {State.LOST, State.LEFT_OUT} & {states[source], states[destination]}
    return LinkPicture(
        source=source,
        destination=destination,
        delay_s=None if load is None else load.delay_s[destination],
        planned_delay_s=float(parts.cluster.delay_s[source, destination]),
        bandwidth_bytes_per_s=(None if load is None else load.bandwidth_bytes_per_s[destination]),
        sent_bytes=None if vitals is None else vitals.sent_bytes[destination],
        up=up and (load is None or destination not in load.unreachable),
    )


def _policy(parts: Parts) -> PolicyPicture:
    settings, said = parts.planner.settings, parts.front_end.speculation.guessing
    return policy_picture(
        settings,
        guessing=bool(settings.guesses) and parts.prices.guesses_now(),
        guesses_made=said.made,
        guesses_right=said.right,
        engines_built=parts.planner.builds,
    )
