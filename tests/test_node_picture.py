"""What a server of a cluster shows of it, while others die and come back."""

from __future__ import annotations

import numpy as np

from nodes import hybrid_routes, request, running, world
from serving import Tiny
from trimmoe.runtime.picture import Picture, State
from wires import until


def states(picture: Picture) -> list[State]:
    return [server.state for server in picture.servers]


async def test_a_cluster_shows_who_is_there_what_they_hold_and_what_is_under_way(
    tiny: Tiny,
) -> None:
    profile, plan = world(tiny, servers=3, routes=hybrid_routes(3))
    async with running(tiny, profile=profile, plan=plan) as cluster:
        front_end = cluster.nodes[0].front_end
        await until(lambda: states(front_end.picture()) == [State.UP] * 3)
        stream = front_end.submit(request([1, 2, 3, 4], 40))
        for _ in range(5):
            await anext(stream)
        shown = front_end.picture()
        held = [server.experts for server in shown.layout.servers]
        assert held == [
            tuple(tuple(np.flatnonzero(layer).tolist()) for layer in hosts) for hosts in plan.hosts
        ]
        assert shown.routes == tuple(tuple(route) for route in plan.routes.tolist())
        (one,) = shown.requests
        assert (one.state, one.prompt_tokens, one.most_tokens) == ("answering", 4, 40)
        assert one.tokens >= 5
        assert (shown.running, shown.waiting) == (1, 0)
        assert not shown.policy.trims
        await stream.aclose()
        await until(lambda: _told(front_end.picture()))
        await cluster.kill(2)
        await until(lambda: states(front_end.picture()) == [State.UP, State.UP, State.LOST])
        lost = front_end.picture()
        assert lost.routes[2] is None
        assert lost.servers[2].tokens == 0
        cut = {(link.source, link.destination) for link in lost.links if not link.up}
        assert cut == {(0, 2), (2, 0), (1, 2), (2, 1)}
        await cluster.connect(2)
        await until(lambda: states(front_end.picture())[2] is State.STARTING)
        before_s = front_end.picture().servers[0].uptime_s
        await cluster.start(2)
        await until(lambda: states(front_end.picture()) == [State.UP] * 3)
        again = front_end.picture()
        assert again.servers[2].uptime_s < again.servers[0].uptime_s
        assert again.servers[0].uptime_s >= before_s


def _told(picture: Picture) -> bool:
    """Whether all that happened before has been told by everybody."""
    sent = [link.sent_bytes for link in picture.links]
    delays = [link.delay_s for link in picture.links]
    used = picture.servers[0].tokens >= 5 and all(each.memory_bytes for each in picture.servers)
    return used and all(sent) and None not in delays
