"""What one action costs: seconds and messages of running a layer's slots on chosen servers.

A token at layer l sits on its source server, kappa(l); what the layer yields gathers on its
destination, kappa(l+1). The activated experts ("slots") run in parallel on the servers chosen for
them, so delay is the maximum over distinct servers, messages are the sum. With
d(a, b) = z / B_ab + tau_ab (14), zero if a = b:

    delay = max( d(source, destination),
                 max over servers m used of d(source, m) + wait_m + sum c/F_m + d(m, destination) )

where wait_m is that of work which comes from another server. The source's own slots follow
attention in the same batch and wait for nobody; that batch's own wait is the same whatever is
decided, and part of no action's cost.

For one slot under `migrate` accounting, where the destination is the server that executed, this
is the paper's (30) to the letter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property

import numpy as np

from trimmoe.core.precision import bits_in_groups
from trimmoe.core.specs import (
    USUAL_DRAFTED,
    ClusterSpec,
    FloatArray,
    IntArray,
    ModelSpec,
    Speeds,
    straight_times,
)
from trimmoe.core.stand_ins import RUNGS
from trimmoe.cost import kernels
from trimmoe.cost.batching import BATCH_SHARE, batch_s
from trimmoe.cost.head_law import tokens_per_pass

TOKEN_ID_BYTES = 8
"""A sampled token on its way to the access server, or from it to the first layer's server."""


class Accounting(StrEnum):
    """Where a token and its KV cache live between layers."""

    PINNED = "pinned"
    """Layer l's attention and KV stay on the route's kappa(l); physical, the default."""
    HOME = "home"
    """Pinned with the whole route on the access server; physical."""
    MIGRATE = "migrate"
    """The paper's (12), (13), (29): the token moves to where it was executed and its KV follows
    free of charge. Not physical; kept to compare with the paper."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Seconds and bytes of every elementary step, M servers, N layers, E experts."""

    transfer_s: FloatArray
    """d(a, b) of one hidden vector, [M, M]."""
    token_transfer_s: FloatArray
    """The same for one token id, [M, M]."""
    hidden_bytes: int
    expert_s: FloatArray
    """c / F of (15), [M, N, E]."""
    dense_s: FloatArray
    """Attention, router, shared expert on the token's server; zero under `migrate`, whose delay
    (30) has no such term, [M, N]."""
    waiting_s: FloatArray
    """Expected wait before a server starts on slots that come from another, [M]."""
    accounting: Accounting
    busy: FloatArray | None = None
    """Share of the time that each server computes, [M]; None where nobody has measured it."""
    guess_s: FloatArray | None = None
    """Time of a server's own guess of a token, [M]; None: as the layers' say."""
    guess_ends_s: FloatArray | None = None
    """Of that, what is no layer's: the output head, and naming drafts, [M]; None: nothing."""
    machine: IntArray | None = None
    """Number of each server's machine, [M]; None: each has one to itself."""
    at_once: FloatArray | None = None
    """Servers of its machine that may compute at once without holding one another up, [M]."""
    rung_share: FloatArray | None = None
    """Time of a copy that stands in for an expert over the expert's, by rung and expert,
    [K, N, E]; None where none is priced."""
    apart_s: FloatArray | None = None
    """What it takes each server to send another message, [M]; None: nothing, as nominally."""
    token_s: FloatArray | None = None
    """As in `Speeds`, part of `enter_s`, [M]; None: nothing, as nominally."""
    head_right: float = 0.0
    """As in `Speeds`."""
    naming_s: FloatArray | None = None
    """As in `Speeds`, [M]; None: nothing."""
    batch_times: tuple[float, ...] = straight_times(BATCH_SHARE)
    """As in `Speeds`."""

    @property
    def server_count(self) -> int:
        return self.transfer_s.shape[0]

    @property
    def layer_count(self) -> int:
        return self.expert_s.shape[1]

    @cached_property
    def enter_s(self) -> FloatArray:
        """Until a token of a server's users, row, is where its first layer runs, column, [M, M]:
        what software takes for it on its user's server, and its id's way."""
        if self.token_s is None:
            return self.token_transfer_s
        return self.token_transfer_s + self.token_s[:, None]

    def ends_s(self, routes: IntArray) -> FloatArray:
        """What a token takes beside its layers and the ways between them, on each access server's
        route of `routes` [A, N]: software, and its id's way in and out, [A]."""
        access = np.arange(routes.shape[0])
        return self.enter_s[access, routes[:, 0]] + self.token_transfer_s[routes[:, -1], access]

    @cached_property
    def links(self) -> kernels.Links:
        """The same arrays in the form that the compiled loops read."""
        apart_s = np.zeros(self.server_count) if self.apart_s is None else self.apart_s
        arrays = (self.transfer_s, self.arrival_wait_s, self.form_s, apart_s)
        return kernels.Links(*(kernels.plain(each) for each in arrays))

    @cached_property
    def form_s(self) -> FloatArray:
        """What all that may run in a slot takes, as `core.stand_ins` numbers it, [M, N, F * E]."""
        if self.rung_share is None:
            return self.expert_s
        copies = [self.expert_s * share for share in self.rung_share]
        return np.concatenate([self.expert_s, *copies], axis=2)

    @cached_property
    def arrival_wait_s(self) -> FloatArray:
        """Expected wait of slots that a source, row, has run by a server, column, [M, M].

        Nothing on the source itself, nor, see `kernels.wait_s`, where the layer gathers. Under
        `migrate`, whose delay has no attention that slots could follow at once, a token queues anew
        in every layer.
        """
        wait_s = np.tile(self.waiting_s, (self.server_count, 1))
        if self.accounting is not Accounting.MIGRATE:
            np.fill_diagonal(wait_s, 0.0)
        return wait_s

    @cached_property
    def occupancy(self) -> FloatArray:
        """Share of what each server's machine can do that it does, as far as was measured, [M]."""
        if self.busy is None:
            return np.zeros(self.server_count)
        if self.machine is None or self.at_once is None:
            return self.busy
        together = np.bincount(self.machine, weights=self.busy)[self.machine]
        return together / self.at_once

    def with_waiting(self, waiting_s: FloatArray) -> CostModel:
        """The same costs with other measured waiting times, [M]."""
        return replace(self, waiting_s=waiting_s)


def cost_model(
    model: ModelSpec, cluster: ClusterSpec, accounting: Accounting = Accounting.PINNED
) -> CostModel:
    """The cost model of `model` on `cluster` without load.

    Where servers were measured, that is what it says; else (15), FLOPs over nominal FLOPS, which is
    all that `migrate` knows, as the paper does.
    """
    nominal = _nominal(model, cluster, accounting)
    if cluster.speeds is None or accounting is Accounting.MIGRATE:
        return nominal
    return _measured(nominal, model, cluster.speeds)


def _nominal(model: ModelSpec, cluster: ClusterSpec, accounting: Accounting) -> CostModel:
    per_flop_s = 1.0 / cluster.flops_per_s
    dense_s = np.outer(per_flop_s, model.layer_dense_flops)
    return CostModel(
        transfer_s=cluster.transfer_s(model.hidden_bytes),
        token_transfer_s=cluster.transfer_s(TOKEN_ID_BYTES),
        hidden_bytes=model.hidden_bytes,
        expert_s=per_flop_s[:, None, None] * model.expert_flops[None],
        dense_s=np.zeros_like(dense_s) if accounting is Accounting.MIGRATE else dense_s,
        waiting_s=np.zeros(cluster.server_count),
        accounting=accounting,
        rung_share=None if accounting is Accounting.MIGRATE else rung_shares(model),
    )


def rung_shares(model: ModelSpec) -> FloatArray:
    """Time of a copy over its expert's, [K, N, E]: what takes time where a token runs by itself is
    to read weights. No copy is taken to be slower than what it stands in for."""
    weights = model.expert_flops / 2
    sizes = [weights * bits_in_groups(bits) / 8 for bits in RUNGS]
    return np.minimum(np.stack(sizes) / model.expert_bytes, 1.0)


def _measured(nominal: CostModel, model: ModelSpec, speeds: Speeds) -> CostModel:
    """What was measured in the place of the nominal figures; layers and experts of one size.

    A token meets the head once: it counts to the last layer. Whoever exits is not charged
    for it.
    """
    dense = model.layer_dense_flops / model.layer_dense_flops.mean()
    dense_s = np.outer(speeds.dense_s, dense)
    dense_s[:, -1] += speeds.head_s
    # Receiving and beginning is the work of who is sent to.
    away = ~np.eye(nominal.server_count, dtype=bool)
    return replace(
        nominal,
        transfer_s=nominal.transfer_s + away * speeds.hop_s,
        token_transfer_s=nominal.token_transfer_s + away * speeds.hop_s,
        expert_s=np.multiply.outer(speeds.expert_s, model.expert_flops / model.expert_flops.mean()),
        dense_s=dense_s,
        guess_s=speeds.draft_s,
        guess_ends_s=_guess_ends_s(speeds),
        apart_s=speeds.hop_s,
        machine=speeds.machine,
        at_once=speeds.at_once,
        batch_times=speeds.batch_times,
        token_s=speeds.token_s,
        head_right=speeds.head_right,
        naming_s=speeds.naming_s,
    )


def _guess_ends_s(speeds: Speeds) -> FloatArray:
    """As in `CostModel`. A draft head's names are read along with the token before, so that a pass
    brings as many tokens as are right."""
    drafted = 0 if speeds.naming_s is None or not speeds.head_right else USUAL_DRAFTED
    naming_s = 0.0 if speeds.naming_s is None else drafted * speeds.naming_s
    read_s = batch_s(1.0, 1 + drafted, speeds.batch_times) * speeds.head_s + naming_s
    tokens = tokens_per_pass(speeds.head_right) if drafted else 1.0
    return np.minimum(read_s / tokens, speeds.draft_s)


def host_delay_s(cost: CostModel, layer: int, source: int, destination: int) -> FloatArray:
    """Delay of one slot alone on every server and expert of `layer` (30), shape [M, E]."""
    wait_s = cost.arrival_wait_s[source].copy()
    wait_s[destination] = cost.arrival_wait_s[destination, destination]
    path = cost.transfer_s[source] + wait_s + cost.transfer_s[:, destination]
    return path[:, None] + cost.expert_s[:, layer]


def layer_delay_s(
    cost: CostModel,
    layer: int,
    source: IntArray,
    destination: IntArray,
    slot_expert: IntArray,
    slot_server: IntArray,
) -> FloatArray:
    """Delay of the slots of one layer, without the dense part (see the module docstring).

    `source`, `destination`: shape [...]; `slot_expert`, `slot_server`: [..., k], expert -1 is a
    dropped slot, its server is ignored. Returns shape [...].
    """
    slots = slot_expert.shape[-1]
    shape = np.broadcast_shapes(
        source.shape, destination.shape, slot_expert.shape[:-1], slot_server.shape[:-1]
    )
    ends = [np.broadcast_to(end, shape).reshape(-1) for end in (source, destination)]
    chosen = [
        np.broadcast_to(array, (*shape, slots)).reshape(-1, slots)
        for array in (slot_expert, slot_server)
    ]
    whole = [kernels.plain(array, np.int64) for array in (*ends, *chosen)]
    return kernels.all_slots_delay_s(cost.links, layer, *whole).reshape(shape)


def add_layer_messages(
    cost: CostModel,
    messages: IntArray,
    rows: IntArray,
    source: IntArray,
    destination: IntArray,
    slot_expert: IntArray,
    slot_server: IntArray,
) -> None:
    """Count hidden vectors sent over each link for one layer of n tokens, in place, in their `rows`
    [n] of `messages` [.., M, M].

    A dispatch to every distinct server but the source, a return from every distinct server but
    the destination, and the residual from source to destination. Where the destination itself
    runs a slot and nothing ran at the source, dispatch and residual are the same vector: the
    dense part is everywhere, so the destination derives what it needs from it.
    """
    whole = [
        kernels.plain(array, np.int64)
        for array in (rows, source, destination, slot_expert, slot_server)
    ]
    kernels.add_messages(messages, *whole, cost.accounting is Accounting.MIGRATE)
