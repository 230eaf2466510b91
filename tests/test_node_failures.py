"""Servers that die take nobody's answer with them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from devices import copies
from nodes import LINKS, Servers, answers, read, replayed, request, running, tokens_of, world
from serving import Tiny
from tiny import LAYERS
from trimmoe.core.ledger import Kind
from trimmoe.core.plan import Plan
from trimmoe.core.profile import Profile
from trimmoe.cost.actions import Levers
from trimmoe.models.exact import greedy
from trimmoe.policy.presets import PRESETS, auto_within
from trimmoe.policy.settings import PolicySettings
from trimmoe.runtime.sampling import Sampling
from trimmoe.runtime.service import TokenEvent, TokenStream, Unavailable
from wires import soon, until

LONG = 60
ROUTES = [[0, 1, 1, 0], [1, 1, 1, 1], [2, 2, 3, 3], [3, 3, 2, 3]]
"""Server 1 is on the routes of servers 0 and 1 only."""


def replicated(tiny: Tiny, *, holders: dict[int, list[int]]) -> tuple[Profile, Plan]:
    """Every expert on server 0 and also on those of `holders`, by server all or some layers."""
    profile, plan = world(tiny, servers=4, routes=ROUTES)
    hosts = np.zeros_like(plan.hosts)
    for server, layers in holders.items():
        hosts[server, layers] = True
    return profile, replace(plan, hosts=hosts)


ALL = list(range(LAYERS))
EVERYWHERE = dict.fromkeys(range(4), ALL)
DRAFTING = PRESETS["trimmoe"]().but(
    draft_confidence=0.6, budget=0.0, exits_weighed=False, name="drafting"
)
GUESSING = replace(PRESETS["speculative"](), guess_confidence=0.0)
either = pytest.mark.parametrize(
    "policy", [PRESETS["exact"](), DRAFTING, GUESSING], ids=["exact", "drafts", "guesses"]
)


def expected(tiny: Tiny, prompt: list[int], new: int) -> list[int]:
    return greedy(tiny.view, [prompt], new)[0]


async def some(stream: TokenStream, count: int) -> list[TokenEvent]:
    return [await soon(anext(stream)) for _ in range(count)]


def restarts(servers: Servers) -> dict[int, int]:
    return {server: node.front_end.restarts for server, node in servers.nodes.items()}


@either
async def test_a_server_that_dies_takes_no_answer_with_it(
    tiny: Tiny, policy: PolicySettings
) -> None:
    """Those that cross it go on elsewhere without a token lost or repeated; others never notice."""
    profile, plan = replicated(tiny, holders=EVERYWHERE)
    prompts = [[5 + i, 9, 77, 31 + i] for i in range(6)]
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        access = [(0, 2, 3)[i % 3] for i in range(6)]
        streams = [
            cluster.nodes[server].service.submit(request(prompt, LONG))
            for server, prompt in zip(access, prompts, strict=True)
        ]
        begun = await asyncio.gather(*(some(stream, 5 + i) for i, stream in enumerate(streams)))
        await cluster.kill(1)
        rest = await soon(asyncio.gather(*(read(stream) for stream in streams)))
        assert restarts(cluster) == {0: 2, 2: 0, 3: 0}
        await cluster.all_free()
    for prompt, head, tail in zip(prompts, begun, rest, strict=True):
        assert tokens_of(head) + tokens_of(tail) == expected(tiny, prompt, LONG)
        assert (head + tail)[-1].finish_reason == "length"


async def test_a_server_that_fails_inside_is_as_good_as_dead(
    tiny: Tiny, caplog: pytest.LogCaptureFixture
) -> None:
    profile, plan = replicated(tiny, holders=EVERYWHERE)
    async with running(tiny, profile=profile, plan=plan) as cluster:
        bad = cluster.nodes[1]
        # Long enough that it is not over before something breaks.
        own = bad.service.submit(request([3, 4, 5], 240))
        other = cluster.nodes[0].service.submit(request([3, 4, 5], LONG))
        head = await some(other, 4)
        await some(own, 1)

        def breaks(*_: object) -> None:
            raise RuntimeError("broken on purpose")

        bad.worker.states = breaks  # type: ignore[method-assign]
        with pytest.raises(Unavailable, match="failed"):
            await soon(read(own))
        assert not bad.service.health().ok
        rest = await soon(read(other))
    assert tokens_of(head + rest) == expected(tiny, [3, 4, 5], LONG)
    assert "broken on purpose" in caplog.text


@either
async def test_sampled_answers_go_on_with_the_same_draws(
    tiny: Tiny, policy: PolicySettings
) -> None:
    profile, plan = replicated(tiny, holders=EVERYWHERE)
    asked = request([70, 71, 72], 60, sampling=Sampling(temperature=1.2, top_p=0.9, seed=5))
    answers = []
    for dies in (False, True):
        async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
            stream = cluster.nodes[0].service.submit(asked)
            events = await some(stream, 10)
            if dies:
                await cluster.kill(1)
            answers.append(tokens_of(events + await soon(read(stream))))
            assert cluster.nodes[0].front_end.restarts == int(dies)
    assert answers[0] == answers[1]


async def test_a_server_that_comes_back_takes_work_again(tiny: Tiny) -> None:
    profile, plan = replicated(tiny, holders=EVERYWHERE)
    async with running(tiny, profile=profile, plan=plan) as cluster:
        stream = cluster.nodes[0].service.submit(request([3, 4, 5], 240))
        head = await some(stream, 5)
        await cluster.kill(1)
        head += await some(stream, 5)
        back = await cluster.revive(1)
        await until(lambda: not cluster.nodes[0].planner.in_force.conditions.lost)
        assert cluster.nodes[0].planner.in_force.route_of(0) == tuple(ROUTES[0])
        # The sequence under way stays where it is; a new one crosses the server again.
        assert back.snapshot().sequences == 0
        made = await soon(read(cluster.nodes[0].service.submit(request([6, 7], 12))))
        # Both of its layers in one go: it has all experts.
        assert back.snapshot().items["ATTEND"] == 11
        own = await soon(read(back.service.submit(request([8, 9], 12))))
        rest = await soon(read(stream))
        await cluster.all_free()
    assert tokens_of(head + rest) == expected(tiny, [3, 4, 5], 240)
    assert tokens_of(made) == expected(tiny, [6, 7], 12)
    assert tokens_of(own) == expected(tiny, [8, 9], 12)


async def test_detours_outlive_the_failure_that_they_were_found_for(tiny: Tiny) -> None:
    """Everybody's route crosses the dead server; when it is back nobody needs the detours, but
    the answers that were begun on them do."""
    profile, plan = replicated(tiny, holders=EVERYWHERE)
    plan = replace(plan, routes=np.array([[a, 1, (a + 1) % 4, a] for a in range(4)]))
    access = [0, 2, 3, 0, 2, 3]
    prompts = [[5 + i, 9, 77] for i in range(len(access))]
    async with running(tiny, profile=profile, plan=plan) as cluster:
        streams = [
            cluster.nodes[server].service.submit(request(prompt, 200))
            for server, prompt in zip(access, prompts, strict=True)
        ]
        made = await asyncio.gather(*(some(stream, 4) for stream in streams))
        await cluster.kill(1)
        await until(lambda: all(1 in node.planner.lost for node in cluster.nodes.values()))
        more = await asyncio.gather(*(some(stream, 8) for stream in streams))
        on_detours = restarts(cluster)
        await cluster.revive(1)
        await until(
            lambda: not any(n.planner.in_force.conditions.lost for n in cluster.nodes.values())
        )
        rest = await soon(asyncio.gather(*(read(stream) for stream in streams)))
        assert restarts(cluster) == {1: 0} | on_detours
        await cluster.all_free()
    for prompt, *parts in zip(prompts, made, more, rest, strict=True):
        assert tokens_of([event for part in parts for event in part]) == expected(tiny, prompt, 200)


async def test_an_expert_whose_host_died_runs_at_another(tiny: Tiny) -> None:
    """The route does not cross the dead server, its experts did."""
    holders = {1: ALL, 3: ALL}
    profile, plan = replicated(tiny, holders=holders)
    plan = replace(plan, routes=np.array([[0] * 4, [1] * 4, [2] * 4, [3] * 4]))
    async with running(tiny, profile=profile, plan=plan) as cluster:
        streams = [cluster.nodes[a].service.submit(request([3, 4, a], LONG)) for a in (0, 2)]
        heads = [await some(stream, 4) for stream in streams]
        await cluster.kill(1)
        rests = await soon(asyncio.gather(*(read(stream) for stream in streams)))
        await cluster.all_free()
    for access, head, rest in zip((0, 2), heads, rests, strict=True):
        assert tokens_of(head + rest) == expected(tiny, [3, 4, access], LONG)


def orphaning(
    tiny: Tiny, loss: float, routes: Sequence[Sequence[int]] = ([0] * 4, [1] * 4)
) -> tuple[Profile, Plan]:
    """When server 1 dies nobody holds expert 2 of layer 1 any more; any may stand in for it."""
    profile, plan = world(tiny, servers=len(routes), routes=routes)
    hosts = np.ones_like(plan.hosts)
    hosts[:, 1, 2] = [server == 1 for server in range(len(routes))]
    substitution = np.full_like(profile.substitution_loss, loss)
    experts = np.arange(substitution.shape[2])
    substitution[..., experts, experts] = 0.0
    profile = replace(
        profile,
        feasible=np.ones_like(profile.feasible),
        substitution_loss=substitution,
        change_echo=np.zeros_like(profile.change_echo),
    )
    return profile, replace(plan, hosts=hosts)


async def bereaved(
    tiny: Tiny, profile: Profile, plan: Plan, policy: PolicySettings, kind: Kind
) -> tuple[list[TokenEvent], list[TokenEvent]]:
    """An answer in which the only host of an expert dies, and one that begins afterwards: within
    their budgets layer 1 is of this kind in both; an exact one is refused."""
    async with running(tiny, profile=profile, plan=plan, policy=policy, patience_s=0.0) as cluster:
        service = cluster.nodes[0].service
        stream = service.submit(request([3, 4, 5], 60))
        events = await some(stream, 4)
        await cluster.kill(1)
        events += await soon(read(stream))
        fresh = await soon(read(service.submit(request(list(range(40, 90)), 20))))
        with pytest.raises(Unavailable, match="no substitute"):
            await soon(read(service.submit(request(list(range(40, 90)), 20, exact=True))))
        await cluster.all_free()
    for made in (events, fresh):
        ledgers = [event.ledger for event in made if event.ledger is not None]
        spent = np.cumsum([ledger.loss for ledger in ledgers])
        assert (spent <= np.cumsum([ledger.budget for ledger in ledgers]) + 1e-9).all()
        assert sum(ledger.kinds[1, kind] for ledger in ledgers) > 0
    return events, fresh


async def test_an_expert_without_a_live_host_is_substituted_within_the_budget(tiny: Tiny) -> None:
    profile, plan = orphaning(tiny, loss=0.01)
    policy = replace(PRESETS["substitute-only"](), budget=0.2)
    events, fresh = await bereaved(tiny, profile, plan, policy, Kind.LOCAL_SUBSTITUTE)
    assert (len(events), len(fresh)) == (60, 20)


async def test_auto_with_a_budget_trims_while_an_expert_has_no_host(tiny: Tiny) -> None:
    """And only then: before nothing is charged but guesses that are kept, each a whole token."""
    profile, plan = orphaning(tiny, loss=0.01)
    policy = replace(auto_within(), budget=0.2)
    events, fresh = await bereaved(tiny, profile, plan, policy, Kind.LOCAL_SUBSTITUTE)
    assert (len(events), len(fresh)) == (60, 20)
    first = [event.ledger.loss for event in events[:4] if event.ledger is not None]
    assert set(first) <= {0.0, 1.0}


@copies
async def test_an_expert_without_a_live_host_is_stood_in_for_within_the_budget(tiny: Tiny) -> None:
    """By its copy on the server where the token is, in answers and prompts."""
    profile, plan = orphaning(tiny, loss=0.01)
    bits = np.where(plan.hosts, 0, 8)
    plan = replace(plan, stand_in_bits=bits)
    levers = Levers(substitute=False, stand_in=True, drop_slots=False, skip=False, exit=False)
    policy = replace(PRESETS["substitute-only"](), budget=0.5, levers=levers)
    events, fresh = await bereaved(tiny, profile, plan, policy, Kind.LOCAL_STAND_IN)
    assert fresh[0].ledger is not None
    assert fresh[0].ledger.loss > 0, "the prompt ran a copy too"
    assert (len(events), len(fresh)) == (60, 20)


@pytest.mark.parametrize("prefill_chunk", [7, 64])
async def test_stand_ins_for_a_prompts_experts_are_charged(tiny: Tiny, prefill_chunk: int) -> None:
    """Wherever its layers run and however it is cut into chunks."""
    loss, budget, prompt = 0.01, 0.2, list(range(40, 90))
    profile, plan = orphaning(tiny, loss, routes=[[0, 0, 2, 2]] * 3)
    policy = replace(PRESETS["substitute-only"](), budget=budget)
    async with running(
        tiny, profile=profile, plan=plan, policy=policy, prefill_chunk=prefill_chunk
    ) as cluster:
        await cluster.kill(1)
        await until(lambda: all(1 in node.planner.lost for node in cluster.nodes.values()))
        (made,) = await answers(cluster, [(0, request(prompt, 2))])
        await cluster.all_free()
    charged = made[0].ledger
    assert charged is not None
    assert charged.tokens == charged.hops == 0
    # The tokens of the prompt whose router asks for the orphan, once each.
    orphaned = routed_to(tiny, prompt, layer=1, expert=2)
    assert 0 < orphaned < len(prompt)
    assert charged.loss == pytest.approx(loss * orphaned)
    assert charged.budget == pytest.approx(budget * orphaned)


def routed_to(tiny: Tiny, prompt: list[int], *, layer: int, expert: int) -> int:
    """How many tokens of a prompt activate an expert."""
    view = tiny.view
    cache = view.new_cache(slots=1)
    with torch.inference_mode():
        batch = view.batch(cache, (cache.alloc(),), [range(len(prompt))])
        hidden = view.embed(batch.pad([tuple(prompt)]), batch)
        for at in range(layer):
            attended = batch.pack(view.attend(at, hidden, batch, cache))
            routing = view.route(at, attended)
            shared = view.shared(at, attended)
            routed = view.experts(at, attended, routing.experts, routing.gates)
            hidden = batch.unpack(view.finish(at, attended, shared, routed))
        routing = view.route(layer, batch.pack(view.attend(layer, hidden, batch, cache)))
    return int((routing.experts == expert).any(-1).sum())


@pytest.mark.parametrize(
    ("policy", "changes"),
    [
        (replace(PRESETS["substitute-only"](), budget=0.005), {}),
        (replace(PRESETS["substitute-only"](), budget=0.2), {"quality_budget": 0.005}),
        (replace(PRESETS["substitute-only"](), budget=0.2), {"quality_budget": 0.0}),
        (replace(PRESETS["substitute-only"](), budget=0.2), {"exact": True}),
        (PRESETS["exact"](), {}),
    ],
    ids=["dear", "dear request", "no budget", "exact request", "exact policy"],
)
async def test_a_prompt_that_no_stand_in_can_serve_within_its_budget_ends_with_a_clear_error(
    tiny: Tiny, policy: PolicySettings, changes: dict
) -> None:
    profile, plan = orphaning(tiny, loss=0.01)
    async with running(tiny, profile=profile, plan=plan, policy=policy, patience_s=0.0) as cluster:
        await cluster.kill(1)
        await until(lambda: 1 in cluster.nodes[0].planner.lost)
        with pytest.raises(Unavailable, match="no substitute is within its quality budget"):
            await answers(cluster, [(0, request(list(range(40, 90)), 20, **changes))])
        await cluster.all_free()


async def test_a_request_waits_a_while_for_the_only_host_to_come_back(tiny: Tiny) -> None:
    profile, plan = orphaning(tiny, loss=0.9)
    async with running(tiny, profile=profile, plan=plan, patience_s=60.0) as cluster:
        stream = cluster.nodes[0].service.submit(request(list(range(40, 90)), 100))
        head = await some(stream, 4)
        await cluster.kill(1)
        await until(lambda: cluster.nodes[0].front_end.restarts)
        await cluster.revive(1)
        rest = await soon(read(stream))
    assert tokens_of(head + rest) == expected(tiny, list(range(40, 90)), 100)


async def test_places_of_a_dead_servers_users_are_freed(tiny: Tiny) -> None:
    profile, plan = world(tiny, servers=2, routes=[[0, 1, 0, 1], [0, 1, 0, 1]])
    async with running(tiny, profile=profile, plan=plan) as cluster:
        stream = cluster.nodes[1].service.submit(request([3, 4, 5], 240))
        await some(stream, 3)
        assert cluster.nodes[0].snapshot().sequences == 1
        await cluster.kill(1)
        await cluster.all_free()
        with pytest.raises(Unavailable):
            await soon(read(stream))


async def test_a_link_that_stalls_briefly_costs_nothing_but_time(tiny: Tiny) -> None:
    profile, plan = replicated(tiny, holders={0: ALL, 1: ALL})
    async with running(tiny, profile=profile, plan=plan) as cluster:
        stream = cluster.nodes[0].service.submit(request([3, 4, 5], 60))
        events = await some(stream, 4)
        names = cluster.names
        cluster.network.stall(names[1], names[0])
        await asyncio.sleep(LINKS.silence_s / 5)
        cluster.network.resume(names[1], names[0])
        events += await soon(read(stream))
        assert cluster.nodes[0].front_end.restarts == 0
    assert tokens_of(events) == expected(tiny, [3, 4, 5], 60)


@either
async def test_a_link_that_is_cut_and_heals_loses_no_token(
    tiny: Tiny, policy: PolicySettings
) -> None:
    """Both servers live on; what was under way between them is done again on a way around."""
    profile, plan = replicated(tiny, holders=EVERYWHERE)
    plan = replace(plan, routes=np.array([[0, 1, 2, 0], [1] * 4, [2] * 4, [3] * 4]))
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        stream = cluster.nodes[0].service.submit(request([3, 4, 5], LONG))
        events = await some(stream, 4)
        one, other = cluster.names[1], cluster.names[2]
        cluster.network.stall(one, other)
        cluster.network.stall(other, one)
        await until(lambda: (1, 2) in cluster.nodes[0].planner.in_force.conditions.cut)
        assert cluster.nodes[0].planner.in_force.route_of(0) != (0, 1, 2, 0)
        events += await some(stream, 4)
        cluster.network.resume(one, other)
        cluster.network.resume(other, one)
        await until(lambda: not cluster.nodes[0].planner.in_force.conditions.cut)
        assert cluster.nodes[0].planner.in_force.route_of(0) == (0, 1, 2, 0)
        events += await soon(read(stream))
        again = await soon(read(cluster.nodes[0].service.submit(request([6, 7], 12))))
        await cluster.all_free()
    assert tokens_of(events) == expected(tiny, [3, 4, 5], LONG)
    assert tokens_of(again) == expected(tiny, [6, 7], 12)


async def test_the_budget_holds_across_a_restart(tiny: Tiny) -> None:
    profile, plan = replicated(tiny, holders=EVERYWHERE)
    # Exits are taken whenever they are sure enough, so that there is something to spend on.
    chosen = {"exit_risk": None, "audit_share": 0.0, "exits_weighed": False}
    policy = PRESETS["final-exits"]().but(budget=0.1, **chosen)
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        streams = [
            cluster.nodes[0].service.submit(request([3, 4, i], LONG, confidence=0.6))
            for i in range(6)
        ]
        heads = await asyncio.gather(*(some(stream, 7 + i) for i, stream in enumerate(streams)))
        await cluster.kill(1)
        rests = await soon(asyncio.gather(*(read(stream) for stream in streams)))
        await cluster.all_free()
        # The logs replay across the change of engines too.
        assert all(len(node.worker.engines) > 1 for node in cluster.nodes.values())
        assert sum(replayed(node) for node in cluster.nodes.values()) > 6 * (LONG // 2)
    spent_later = 0.0
    for head, rest in zip(heads, rests, strict=True):
        made = head + rest
        assert len(made) == LONG
        ledgers = [event.ledger for event in made if event.ledger is not None]
        spent = np.cumsum([ledger.loss for ledger in ledgers])
        assert (spent <= np.cumsum([ledger.budget for ledger in ledgers]) + 1e-9).all()
        assert sum(event.ledger is None for event in made) == 2  # each prompt's first prediction
        spent_later += sum(event.ledger.loss for event in rest if event.ledger is not None)
    assert spent_later > 0


@either
async def test_a_server_that_comes_and_goes_is_left_out_until_it_stays(
    tiny: Tiny, policy: PolicySettings
) -> None:
    """Others' requests go around it meanwhile, and its own users are served at once."""
    profile, plan = replicated(tiny, holders=EVERYWHERE)
    plan = replace(plan, routes=np.array([[0, 1, 2, 0], [1] * 4, [2, 1, 0, 2], [3] * 4]))
    async with running(tiny, profile=profile, plan=plan, policy=policy) as cluster:
        planner = cluster.nodes[0].planner
        for _ in range(3):
            await cluster.kill(1)
            await until(lambda: 1 in planner.lost)
            await cluster.revive(1)
            await until(lambda: cluster.names[1] in cluster.transports[0].peers_up())
        assert 1 in planner.lost
        others = [cluster.nodes[0].service.submit(request([3, 4, 5], LONG)) for _ in range(2)]
        heads = [await some(stream, 2) for stream in others]
        own = await soon(read(cluster.nodes[1].service.submit(request([6, 7], 12))))
        await cluster.kill(1)
        made = [head + await soon(read(stream)) for head, stream in zip(heads, others, strict=True)]
        assert not cluster.nodes[0].front_end.restarts
        await cluster.revive(1)
        await until(lambda: planner.settled and planner.in_force.route_of(0) == (0, 1, 2, 0))
        await cluster.all_free()
    assert all(tokens_of(events) == expected(tiny, [3, 4, 5], LONG) for events in made)
    assert tokens_of(own) == expected(tiny, [6, 7], 12)


@either
@pytest.mark.parametrize("seed", range(2))
async def test_servers_may_die_and_return_at_any_moment(
    tiny: Tiny, policy: PolicySettings, seed: int
) -> None:
    """Long prompts and answers everywhere, one server after the other gone and back."""
    rng = np.random.default_rng(seed)
    profile, plan = replicated(tiny, holders={0: ALL, 1: ALL, 2: [0, 2], 3: [1, 3]})
    routes = rng.integers(4, size=(4, LAYERS))
    plan = replace(plan, routes=routes)
    prompts = [rng.integers(0, 256, int(rng.integers(1, 120))).tolist() for _ in range(6)]
    async with running(
        tiny, profile=profile, plan=plan, policy=policy, prefill_chunk=16
    ) as cluster:
        streams = [cluster.nodes[0].service.submit(request(prompt, 40)) for prompt in prompts]
        reading = asyncio.gather(*(read(stream) for stream in streams))
        for victim in rng.permutation([1, 2, 3])[:2].tolist():
            await asyncio.sleep(float(rng.uniform(0.0, 0.6)))
            await cluster.kill(victim)
            if rng.random() < 0.5:
                await until(lambda: cluster.nodes[0].planner.lost)
            await cluster.revive(victim)
        made = await asyncio.wait_for(reading, 60)
        await cluster.all_free()
    for prompt, events in zip(prompts, made, strict=True):
        assert tokens_of(events) == expected(tiny, prompt, 40)


async def test_over_sockets_too(tiny: Tiny) -> None:
    profile, plan = replicated(tiny, holders=EVERYWHERE)
    async with running(tiny, profile=profile, plan=plan, sockets=True) as cluster:
        streams = [cluster.nodes[a].service.submit(request([3, 4, a], LONG)) for a in (0, 2)]
        heads = [await some(stream, 5) for stream in streams]
        await cluster.kill(1)
        rests = await soon(asyncio.gather(*(read(stream) for stream in streams)))
        assert restarts(cluster)[2] == 0
        await cluster.all_free()
    for access, head, rest in zip((0, 2), heads, rests, strict=True):
        assert tokens_of(head + rest) == expected(tiny, [3, 4, access], LONG)
