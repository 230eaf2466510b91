"""What a server shows of the cluster, from what it is told and measures itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trimmoe.runtime.node.records.messages import Vitals, Weather
from trimmoe.runtime.picture import (
    LinkPicture,
    Picture,
    PolicyPicture,
    ServerPicture,
    State,
    policy_picture,
)

if TYPE_CHECKING:
    from trimmoe.runtime.node.node import Node

_NOTHING = Vitals(0, 0, 0, 0.0, [])


def picture_of(node: Node) -> Picture:
    """Everything at this moment; costs nothing but the writing down."""
    health, desk, planner = node.health(), node.desk, node.planner
    servers = range(len(node.layout.servers))
    states = [_state(node, server) for server in servers]
    built = planner.in_force
    return Picture(
        server=node.settings.server,
        ok=health.ok,
        reason=health.reason,
        layout=node.layout,
        servers=tuple(
            _server(state, planner.weather_of(server))
            for server, state in zip(servers, states, strict=True)
        ),
        links=tuple(
            _link(node, source, destination, states)
            for source in servers
            for destination in servers
            if source != destination
        ),
        routes=tuple(
            built.route_of(server) if state is State.UP else None
            for server, state in zip(servers, states, strict=True)
        ),
        policy=_policy(node),
        requests=tuple(desk.under_way()),
        running=desk.running,
        waiting=desk.waiting,
    )


def _state(node: Node, server: int) -> State:
    if server in node.jury.left_out:
        return State.LEFT_OUT
    if server in node.planner.lost:
        return State.LOST
    return State.STARTING if node.planner.weather_of(server) is None else State.UP


def _server(state: State, weather: Weather | None) -> ServerPicture:
    if weather is None or state is not State.UP:
        return ServerPicture(state=state)
    vitals = weather.vitals or _NOTHING
    return ServerPicture(
        state=state,
        busy=weather.busy,
        waiting_s=weather.waiting_s,
        queued=vitals.queued,
        kv_usage=weather.kv_usage,
        running=weather.running,
        tokens=vitals.tokens,
        memory_bytes=vitals.memory_bytes,
        uptime_s=vitals.uptime_s,
    )


def _link(node: Node, source: int, destination: int, states: list[State]) -> LinkPicture:
    weather = node.planner.weather_of(source)
    vitals = None if weather is None else weather.vitals
    up = not {State.LOST, State.LEFT_OUT} & {states[source], states[destination]}
    return LinkPicture(
        source=source,
        destination=destination,
        delay_s=None if weather is None else weather.delay_s[destination],
        planned_delay_s=float(node.cluster.delay_s[source, destination]),
        bandwidth_bytes_per_s=(
            None if weather is None else weather.bandwidth_bytes_per_s[destination]
        ),
        sent_bytes=None if vitals is None else vitals.sent_bytes[destination],
        up=up and (weather is None or destination not in weather.unreachable),
    )


def _policy(node: Node) -> PolicyPicture:
    settings, said = node.planner.settings, node.desk.answers.guessing
    return policy_picture(
        settings,
        guessing=bool(settings.guesses) and node.guesses_now(),
        guesses_made=said.made,
        guesses_right=said.right,
        engines_built=node.planner.builds,
    )
