"""The cost of an action, on a cluster small enough to work out by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from trimmoe.cost.expected import best_hosts
from trimmoe.cost.kernels import curve_at
from trimmoe.cost.model import (
    Accounting,
    CostModel,
    add_layer_messages,
    host_delay_s,
    layer_delay_s,
)


def three_servers(accounting: Accounting = Accounting.PINNED) -> CostModel:
    """Server 0 and 1 are 1 ms apart, server 2 is 10 ms from both; an expert takes 2, 1, 4 ms."""
    transfer = np.array([[0, 1, 10], [1, 0, 10], [10, 10, 0]]) * 1e-3
    return CostModel(
        transfer_s=transfer,
        token_transfer_s=transfer,
        hidden_bytes=100,
        expert_s=np.array([2e-3, 1e-3, 4e-3])[:, None, None] * np.ones((3, 1, 4)),
        dense_s=np.zeros((3, 1)),
        waiting_s=np.zeros(3),
        accounting=accounting,
    )


def delay_ms(cost: CostModel, source: int, destination: int, slots: list[tuple[int, int]]) -> float:
    """Delay of one token whose slots are (expert, server)."""
    experts = np.array([[expert for expert, _ in slots]])
    servers = np.array([[server for _, server in slots]])
    at = (np.array([source]), np.array([destination]))
    return float(layer_delay_s(cost, 0, *at, experts, servers)[0] * 1e3)


def links(cost: CostModel, source: int, destination: int, slots: list[tuple[int, int]]) -> dict:
    """Messages by link of one token whose slots are (expert, server)."""
    experts = np.array([[expert for expert, _ in slots]])
    servers = np.array([[server for _, server in slots]])
    ends, sent = (np.array([source]), np.array([destination])), np.zeros((1, 3, 3), dtype=np.int64)
    add_layer_messages(cost, sent, np.array([0]), *ends, experts, servers)
    return {(int(a), int(b)): int(sent[0, a, b]) for a, b in np.argwhere(sent[0] > 0)}


@pytest.mark.parametrize(
    ("source", "destination", "slots", "expected_ms"),
    [
        (0, 0, [(0, 0)], 2.0),
        (0, 0, [(0, 1)], 1.0 + 1.0 + 1.0),
        (0, 0, [(0, 0), (1, 0)], 2.0 + 2.0),
        (0, 0, [(0, 0), (1, 1)], 3.0),
        (0, 0, [(0, 1), (1, 2)], 10.0 + 4.0 + 10.0),
        (0, 1, [(0, 0)], 2.0 + 1.0),
        (0, 1, [(0, 1)], 1.0 + 1.0),
        (0, 2, [(-1, 0), (-1, 0)], 10.0),
        (0, 0, [(-1, 0), (1, 1)], 3.0),
        (0, 0, [(-1, 2), (-1, 2)], 0.0),
    ],
)
def test_slots_run_in_parallel_and_share_a_server_in_series(
    source: int, destination: int, slots: list[tuple[int, int]], expected_ms: float
) -> None:
    assert delay_ms(three_servers(), source, destination, slots) == pytest.approx(expected_ms)


@pytest.mark.parametrize(
    ("source", "destination", "slots", "expected"),
    [
        (0, 0, [(0, 0), (1, 0)], {}),
        (0, 0, [(0, 1), (1, 1)], {(0, 1): 1, (1, 0): 1}),
        (0, 0, [(0, 1), (1, 2)], {(0, 1): 1, (1, 0): 1, (0, 2): 1, (2, 0): 1}),
        (0, 1, [(0, 0)], {(0, 1): 1}),
        (0, 1, [(0, 1)], {(0, 1): 1}),
        (0, 1, [(0, 0), (1, 1)], {(0, 1): 2}),
        (0, 1, [(0, 2)], {(0, 1): 1, (0, 2): 1, (2, 1): 1}),
        (0, 1, [(-1, 0)], {(0, 1): 1}),
        (0, 0, [(-1, 1), (-1, 2)], {}),
    ],
)
def test_one_vector_per_distinct_server_each_way(
    source: int, destination: int, slots: list[tuple[int, int]], expected: dict
) -> None:
    assert links(three_servers(), source, destination, slots) == expected


@pytest.mark.parametrize("destination", range(3))
@pytest.mark.parametrize("slots", list(product(range(-1, 3), repeat=3)), ids=str)
def test_every_message_that_a_source_sends_beyond_the_first_takes_it_software(
    destination: int, slots: tuple[int, ...]
) -> None:
    """Slots by the server that runs each, -1 for none: as where some run on either end of a hop."""
    cost = three_servers()
    measured = replace(cost, apart_s=np.array([0.3e-3, 5e-3, 7e-3]))
    ran = [(-1, 0) if server < 0 else (j, server) for j, server in enumerate(slots)]
    sent = sum(n for (a, _), n in links(cost, 0, destination, ran).items() if a == 0)
    plain_ms, ms = (delay_ms(each, 0, destination, ran) for each in (cost, measured))
    assert ms == pytest.approx(plain_ms + 0.3 * max(sent - 1, 0))


def test_a_migrating_token_moves_once() -> None:
    """(30): one transfer to the server that executes, none back."""
    cost = three_servers(Accounting.MIGRATE)
    assert delay_ms(cost, 0, 2, [(0, 2)]) == pytest.approx(10.0 + 4.0)
    assert links(cost, 0, 2, [(0, 2)]) == {(0, 2): 1}


def test_only_work_that_is_sent_to_another_server_and_back_waits() -> None:
    """Own slots follow attention in its batch, which has waited already, whatever is decided; and
    where the layer gathers slots run as the token enters the next one, for which it waits anyway.
    """
    cost = three_servers().with_waiting(np.array([50e-3, 5e-3, 0.0]))
    assert delay_ms(cost, 0, 0, [(0, 0)]) == pytest.approx(2.0)
    assert delay_ms(cost, 0, 1, [(0, 0)]) == pytest.approx(2.0 + 1.0)
    assert delay_ms(cost, 0, 0, [(0, 1)]) == pytest.approx(1.0 + 5.0 + 1.0 + 1.0)
    assert delay_ms(cost, 0, 1, [(0, 1)]) == pytest.approx(1.0 + 1.0)
    assert delay_ms(cost, 1, 1, [(0, 0), (1, 1)]) == pytest.approx(1.0 + 50.0 + 2.0 + 1.0)


def test_a_migrating_token_waits_wherever_it_is_executed() -> None:
    """(30) queues a token anew in every layer, also where it already is."""
    cost = three_servers(Accounting.MIGRATE).with_waiting(np.array([50e-3, 5e-3, 0.0]))
    assert delay_ms(cost, 0, 0, [(0, 0)]) == pytest.approx(50.0 + 2.0)
    assert delay_ms(cost, 0, 1, [(0, 1)]) == pytest.approx(1.0 + 5.0 + 1.0)


@pytest.mark.parametrize("accounting", Accounting)
def test_a_slot_alone_costs_what_its_layer_does(accounting: Accounting) -> None:
    cost = three_servers(accounting).with_waiting(np.array([50e-3, 5e-3, 1e-3]))
    for source, destination in np.ndindex(3, 3):
        alone_s = host_delay_s(cost, 0, source, destination)
        for server, expert in np.ndindex(*alone_s.shape):
            at_least_ms = cost.transfer_s[source, destination] * 1e3
            expected_ms = max(at_least_ms, alone_s[server, expert] * 1e3)
            slots = [(expert, server)]
            assert delay_ms(cost, source, destination, slots) == pytest.approx(expected_ms)


@pytest.mark.parametrize(
    ("mass", "loss"), [(0.0, 1.0), (0.25, 1.0), (0.26, 2.0), (0.5, 2.0), (0.51, 4.0), (0.76, 4.0)]
)
def test_a_loss_is_that_of_the_next_edge_up_and_beyond_the_last_that_of_the_last(
    mass: float, loss: float
) -> None:
    edges, upper = np.array([0.25, 0.5, 0.75]), np.array([1.0, 2.0, 4.0])
    assert curve_at(edges, upper, mass) == loss


def test_a_further_message_must_pay() -> None:
    """Server 1 is quicker by 1 ms for what leaves for it. To send another message takes 0.9, then
    1.1 ms."""
    hosts = np.ones((3, 1, 4), dtype=bool)
    hosts[1, 0, 3] = False
    for apart_ms, best in ((0.0, [1, 1, 1, 0]), (0.9, [1, 1, 1, 0]), (1.1, [0, 0, 0, 0])):
        cost = replace(three_servers(), apart_s=np.full(3, apart_ms * 1e-3))
        assert best_hosts(cost, hosts, 0, 0, 1).tolist() == best
    # Of a layer that neither end holds whole, messages go to several servers anyway.
    hosts[0, 0, 2] = False
    assert best_hosts(cost, hosts, 0, 0, 1).tolist() == [1, 1, 1, 0]
    # Where the destination does, one goes there.
    hosts[1, 0, 3] = True
    slow = replace(cost, expert_s=cost.expert_s + np.array([0.0, 2e-3, 0.0])[:, None, None])
    assert best_hosts(slow, hosts, 0, 0, 1).tolist() == [1, 1, 1, 1]
    assert best_hosts(replace(slow, apart_s=None), hosts, 0, 0, 1).tolist() == [0, 0, 1, 0]
