"""Listing the actions of tokens, compiled: what slots may choose from, and what comes of it.

`cost.actions` wraps these with named arrays, `cost.deciding` chooses among what they list. Shapes
as in `cost.kernels`; S substitutes, R ranks of slots, B steadiness classes, C candidate actions.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from trimmoe.core.specs import BoolArray, FloatArray, IntArray
from trimmoe.cost.kernels import Links, bare, curve_at, njit, slots_delay_s, wait_s

DROPPED = -1
"""Expert number of a slot that runs nothing."""


class Menu(NamedTuple):
    """What every slot may choose from; see `cost.actions.ActionSpace`."""

    links: Links
    hosts: BoolArray
    """[M, N, E]."""
    best_server: IntArray
    """Host of least single-slot delay by layer, source, destination and expert, [N, M, M, E]."""
    best_s: FloatArray
    """Its delay, infinite without a host, [N, M, M, E]."""
    substitutes: IntArray
    """Least lossy first, -1 padded, [N, B, E, S]."""
    substitution_loss: FloatArray
    """[N, B, R, E, E]."""
    feasible: BoolArray
    """Which experts may run for a target, [N, E, E]; none where nothing is substituted."""
    drop_edges: FloatArray
    """[N, B, G]; the same for the other three."""
    drop_upper: FloatArray
    skip_edges: FloatArray
    skip_upper: FloatArray
    theta: FloatArray
    """[N]."""
    theta_drop: FloatArray
    """[N]."""
    drops: bool
    """Whether single slots may be dropped."""
    skips: bool
    settles: bool
    """Whether activated sets that run where the token is have no other action."""
    stand_in: IntArray
    """Number of the copy of each expert that each server has, -1 where it has none, [M, N, E]."""
    stand_in_edges: FloatArray
    """[K, N, B, G]: its loss by rung; the same for the other."""
    stand_in_upper: FloatArray
    stands_in: bool
    """Whether there is any."""


class Batch(NamedTuple):
    """n tokens in one layer."""

    experts: IntArray
    """[n, k]."""
    masses: FloatArray
    """[n, k]."""
    importance: FloatArray
    """[n]."""
    steadiness: IntArray
    """[n]."""
    source: IntArray
    """[n]."""
    destination: IntArray
    """[n]."""


class Actions(NamedTuple):
    """Room for the actions of n tokens, written by `enumerate_actions`."""

    expert: IntArray
    """[n, C, k]."""
    server: IntArray
    """[n, C, k]."""
    delay_s: FloatArray
    """[n, C]."""
    loss: FloatArray
    """[n, C]."""


@bare
def _activated(experts, expert):
    """Whether a token's slots [k] have activated an expert, which then stands in for no other."""
    found = False
    for j in range(experts.shape[0]):
        found = found or experts[j] == expert
    return found


@bare
def _stand_in_loss(menu, layer, number, mass, steady):
    """What a slot loses that runs the copy of this number."""
    rung = number // menu.hosts.shape[2] - 1
    edges = menu.stand_in_edges[rung, layer, steady]
    return curve_at(edges, menu.stand_in_upper[rung, layer, steady], mass)


@bare
def local_loss_of(menu, layer, source, experts, masses, steady):
    """Least loss of running all slots [k] on the source, infinite if it cannot: whether there is an
    action without transmission (35)."""
    total, last_rank = 0.0, menu.substitution_loss.shape[2] - 1
    for j in range(experts.shape[0]):
        target, least = experts[j], np.inf
        if menu.hosts[source, layer, target]:
            continue
        losses = menu.substitution_loss[layer, steady, min(j, last_rank), target]
        for runs in range(losses.shape[0]):
            possible = menu.hosts[source, layer, runs] and menu.feasible[layer, target, runs]
            if possible and losses[runs] < least and not _activated(experts, runs):
                least = losses[runs]
        if menu.stands_in and menu.stand_in[source, layer, target] >= 0:
            number = menu.stand_in[source, layer, target]
            least = min(least, _stand_in_loss(menu, layer, number, masses[j], steady))
        total += least
    return total


@njit
def local_losses(menu, layer, source, experts, masses, steadiness):
    """`local_loss_of` n tokens, [n]."""
    loss = np.empty(source.shape[0])
    for i in range(loss.shape[0]):
        loss[i] = local_loss_of(menu, layer, source[i], experts[i], masses[i], steadiness[i])
    return loss


@bare
def _slot_options(menu, layer, tokens, i, source, destination, first_at, limit, room):
    """Fill `room` with the choices of every slot: target, substitutes, nothing, stand-in.

    Choices that lose more than `limit` do not exist.
    """
    expert, server, delay, loss = room
    experts, steady = tokens.experts[i], tokens.steadiness[i]
    slots, others = experts.shape[0], menu.substitutes.shape[3]
    last_rank = menu.substitution_loss.shape[2] - 1
    for j in range(slots):
        target = experts[j]
        for o in range(1 + others):
            runs = target if o == 0 else menu.substitutes[layer, steady, target, o - 1]
            if o > 0 and runs >= 0 and _activated(experts, runs):
                runs = -1
            expert[j, o], loss[j, o], delay[j, o] = runs, 0.0, np.inf
            server[j, o] = source
            if runs < 0:
                continue
            if o > 0:
                loss[j, o] = menu.substitution_loss[layer, steady, min(j, last_rank), target, runs]
                if loss[j, o] > limit:
                    continue
            if j == 0 and first_at >= 0:
                if menu.hosts[first_at, layer, runs]:
                    server[j, o] = first_at
                    path = menu.links.transfer_s[source, first_at]
                    path += wait_s(menu.links, source, first_at, destination)
                    path += menu.links.transfer_s[first_at, destination]
                    delay[j, o] = path + menu.links.expert_s[first_at, layer, runs]
            else:
                server[j, o] = menu.best_server[layer, source, destination, runs]
                delay[j, o] = menu.best_s[layer, source, destination, runs]
        drop = 1 + others
        expert[j, drop], server[j, drop] = -1, source
        loss[j, drop], delay[j, drop] = 0.0, np.inf
        mass = tokens.masses[i, j]
        movable = not (j == 0 and first_at >= 0)
        if menu.drops and slots > 1 and movable and mass <= menu.theta_drop[layer]:
            edges = menu.drop_edges[layer, steady]
            loss[j, drop] = curve_at(edges, menu.drop_upper[layer, steady], mass)
            delay[j, drop] = 0.0 if loss[j, drop] <= limit else np.inf
        if menu.stands_in:
            stand = drop + 1
            expert[j, stand], server[j, stand] = -1, source
            loss[j, stand], delay[j, stand] = 0.0, np.inf
            number = menu.stand_in[source, layer, target]
            if number >= 0 and movable:
                expert[j, stand] = number
                loss[j, stand] = _stand_in_loss(menu, layer, number, mass, steady)
                path = menu.links.transfer_s[source, destination]
                if loss[j, stand] <= limit:
                    delay[j, stand] = path + menu.links.expert_s[source, layer, number]


@bare
def _under_cap(room, cap, at):
    """Under a delay cap every slot takes its least lossy, then fastest, choice; -1 if none."""
    _, _, delay, loss = room
    slots, choices = delay.shape
    for j in range(slots):
        best = -1
        for o in range(choices):
            if not (delay[j, o] <= cap and delay[j, o] < np.inf):
                continue
            if best >= 0 and loss[j, o] > loss[j, best]:
                continue
            if best < 0 or loss[j, o] < loss[j, best] or delay[j, o] < delay[j, best]:
                best = o
        if best < 0:
            return False
        at[j] = best
    return True


@bare
def _met_before(delay, j, o):
    """Whether an earlier choice has the same delay, and so is the same cap."""
    for slot in range(j + 1):
        for choice in range(o if slot == j else delay.shape[1]):
            if delay[slot, choice] == delay[j, o]:
                return True
    return False


@bare
def _write_action(menu, layer, source, destination, room, at, out, i, c):
    """Action `c` of token `i` from the choices `at` [k]; returns whether it exists."""
    expert, server, _, loss = room
    total, runs, exact = 0.0, False, True
    for j in range(at.shape[0]):
        o = at[j]
        out.expert[i, c, j], out.server[i, c, j] = expert[j, o], server[j, o]
        runs = runs or expert[j, o] >= 0
        exact = exact and o == 0
        total += loss[j, o]
    out.loss[i, c] = 0.0 if exact else total
    if runs:
        picked, places = out.expert[i, c], out.server[i, c]
        out.delay_s[i, c] = slots_delay_s(menu.links, layer, source, destination, picked, places)
    else:
        out.delay_s[i, c] = np.inf
    return runs


@bare
def _is_settled(source, destination, first_at, room):
    """Whether all targets run where the token is and stays."""
    _, server, delay, _ = room
    settled = source == destination and first_at < 0
    for j in range(server.shape[0]):
        settled = settled and server[j, 0] == source and delay[j, 0] < np.inf
    return settled


@bare
def token_actions(menu, layer, tokens, i, ends, first_at, limit, room, at, out, row):
    """All actions of token `i` toward one destination into row `row`: exact, then per cap."""
    source, destination = ends
    _slot_options(menu, layer, tokens, i, source, destination, first_at, limit, room)
    _, _, delay, _ = room
    slots, choices = delay.shape
    free = not (menu.settles and _is_settled(source, destination, first_at, room))
    at[:] = 0
    _write_action(menu, layer, source, destination, room, at, out, row, 0)
    for j in range(slots):
        if delay[j, 0] == np.inf:
            out.delay_s[row, 0] = np.inf
    c = 1
    for j in range(slots):
        for o in range(choices):
            fresh = free and delay[j, o] < np.inf and not _met_before(delay, j, o)
            if fresh and _under_cap(room, delay[j, o], at):
                _write_action(menu, layer, source, destination, room, at, out, row, c)
            else:
                out.expert[row, c, :] = -1
                out.server[row, c, :] = source
                out.delay_s[row, c], out.loss[row, c] = np.inf, 0.0
            c += 1
    out.expert[row, c, :] = -1
    out.server[row, c, :] = source
    steady, importance = tokens.steadiness[i], tokens.importance[i]
    edges = menu.skip_edges[layer, steady]
    out.loss[row, c] = curve_at(edges, menu.skip_upper[layer, steady], importance)
    admitted = free and menu.skips and importance <= menu.theta[layer]
    out.delay_s[row, c] = menu.links.transfer_s[source, destination] if admitted else np.inf
    return c


@njit
def choices_of(menu):
    """How many a slot has at most: its target, substitutes, nothing, its stand-in."""
    return menu.substitutes.shape[3] + 2 + (1 if menu.stands_in else 0)


@njit
def make_room(menu, slots):
    """Scratch for the choices of one token's slots."""
    shape = (slots, choices_of(menu))
    whole = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
    return whole[0], whole[1], np.empty(shape), np.empty(shape)


@njit
def enumerate_actions(menu, layer, tokens, first_at, out):
    """The actions of n tokens; the last column is the skip. `first_at` [n], -1: anywhere."""
    count, slots = tokens.experts.shape
    room, at = make_room(menu, slots), np.empty(slots, dtype=np.int64)
    for i in range(count):
        ends = tokens.source[i], tokens.destination[i]
        token_actions(menu, layer, tokens, i, ends, first_at[i], np.inf, room, at, out, i)
