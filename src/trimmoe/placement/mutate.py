"""Random neighbours of a placement that keep memory (c.1) and coverage (c.2).

A neighbour is a wish, such as "this server gets these consecutive layers", after which things are
settled: servers that became too full give layers up, those held elsewhere too first, and experts
left without a host go where there is room, by preference next to their neighbouring layers.
A wish that cannot be settled is given up. Wishes cover moves, swaps, adds and drops of single
experts and of runs of whole layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimmoe.core.specs import BoolArray, IntArray, ModelSpec
from trimmoe.placement.capacity import used_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutator:
    """Draws neighbours; shapes: M servers, N layers, E experts."""

    model: ModelSpec
    capacity: IntArray
    """[M]."""
    mean_run: float = 3.0
    """Mean length of a run of layers."""

    def neighbour(self, hosts: BoolArray, rng: np.random.Generator) -> BoolArray | None:
        """A random neighbour of `hosts` [M, N, E], or None if the wish could not be settled."""
        wish = _WISHES[int(rng.integers(len(_WISHES)))]
        hosts = hosts.copy()
        protected = np.zeros_like(hosts)
        wish(self, hosts, protected, rng)
        return hosts if self._settle(hosts, protected, rng) else None

    def _run(self, rng: np.random.Generator) -> slice:
        layers = self.model.layer_count
        length = min(int(rng.geometric(1.0 / self.mean_run)), layers)
        first = int(rng.integers(layers - length + 1))
        return slice(first, first + length)

    def _server(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.capacity.size))

    def _two_servers(self, rng: np.random.Generator) -> list[int]:
        return rng.choice(self.capacity.size, min(2, self.capacity.size), replace=False).tolist()

    def _give(self, hosts: BoolArray, protected: BoolArray, rng: np.random.Generator) -> None:
        """A run of layers to a server, moved there or copied."""
        server, run = self._server(rng), self._run(rng)
        if rng.random() < 0.5:
            hosts[:, run] = False
        hosts[server, run] = True
        protected[server, run] = True

    def _drop(self, hosts: BoolArray, protected: BoolArray, rng: np.random.Generator) -> None:
        """A run of layers off a server."""
        hosts[self._server(rng), self._run(rng)] = False

    def _exchange(self, hosts: BoolArray, protected: BoolArray, rng: np.random.Generator) -> None:
        """A run of layers, or everything, between two servers."""
        pair = self._two_servers(rng)
        run = slice(None) if rng.random() < 0.2 else self._run(rng)
        hosts[pair, run] = hosts[pair[::-1], run]

    def _extend(self, hosts: BoolArray, protected: BoolArray, rng: np.random.Generator) -> None:
        """A run becomes like the layer before or after it: the borders of stages move."""
        run = self._run(rng)
        like = run.start - 1 if rng.random() < 0.5 else run.stop
        if 0 <= like < self.model.layer_count:
            hosts[:, run] = hosts[:, like, None]
            protected[:, run] = hosts[:, run]

    def _give_one(self, hosts: BoolArray, protected: BoolArray, rng: np.random.Generator) -> None:
        """One expert to a server, moved there or copied."""
        at = int(rng.integers(self.model.layer_count)), int(rng.integers(self.model.expert_count))
        server = self._server(rng)
        if rng.random() < 0.5:
            hosts[(slice(None), *at)] = False
        hosts[(server, *at)] = True
        protected[(server, *at)] = True

    def _drop_one(self, hosts: BoolArray, protected: BoolArray, rng: np.random.Generator) -> None:
        """One replica less."""
        held = np.argwhere(hosts)
        hosts[tuple(held[int(rng.integers(len(held)))])] = False

    def settle(self, hosts: BoolArray, rng: np.random.Generator) -> bool:
        """Restore (c.1) and (c.2) in `hosts` [M, N, E], in place; whether that could be done."""
        return self._settle(hosts, np.zeros_like(hosts), rng)

    def _settle(self, hosts: BoolArray, protected: BoolArray, rng: np.random.Generator) -> bool:
        """Restore (c.1), then (c.2), in place; whether that could be done."""
        free = self.capacity - used_bytes(hosts, self.model)
        for server in np.flatnonzero(free < 0):
            self._evict(hosts, protected, free, int(server), rng)
        if (free < 0).any():
            return False
        orphans = np.logical_not(hosts.any(axis=0))
        return all(
            self._adopt(hosts, free, int(layer), orphans[layer], rng)
            for layer in np.flatnonzero(orphans.any(axis=1))
        )

    def _evict(
        self,
        hosts: BoolArray,
        protected: BoolArray,
        free: IntArray,
        server: int,
        rng: np.random.Generator,
    ) -> None:
        """Give up layers of one server until it fits, from a random layer on."""
        mine = hosts[server] & ~protected[server]
        spare = mine & (hosts.sum(axis=0) > 1)
        start = int(rng.integers(self.model.layer_count))
        layers = np.roll(np.arange(self.model.layer_count), -start)
        for given_up in (spare, mine):
            for layer in layers[given_up[layers].any(axis=1)]:
                gone = given_up[layer] & hosts[server, layer]
                hosts[server, layer, gone] = False
                free[server] += self.model.expert_bytes[layer, gone].sum()
                if free[server] >= 0:
                    return

    def _adopt(
        self,
        hosts: BoolArray,
        free: IntArray,
        layer: int,
        orphans: BoolArray,
        rng: np.random.Generator,
    ) -> bool:
        """A host for the experts `orphans` [E] of a layer: one for all, or else one for each."""
        sizes = self.model.expert_bytes[layer]
        groups = [orphans]
        if not (free >= sizes[orphans].sum()).any():
            each = np.flatnonzero(orphans)
            groups = [
                np.arange(orphans.size) == expert for expert in each[np.argsort(-sizes[each])]
            ]
        for group in groups:
            size = sizes[group].sum()
            roomy = np.flatnonzero(free >= size)
            if roomy.size == 0:
                return False
            server = roomy[
                int((self._kinship(hosts, layer)[roomy] + rng.random(roomy.size)).argmax())
            ]
            hosts[server, layer, group] = True
            free[server] -= size
        return True

    def _kinship(self, hosts: BoolArray, layer: int) -> IntArray:
        """How many experts of this and the neighbouring layers each server holds, [M]."""
        near = slice(max(layer - 1, 0), layer + 2)
        return hosts[:, near].sum(axis=(1, 2))


_WISHES = (
    Mutator._give,
    Mutator._give,
    Mutator._drop,
    Mutator._exchange,
    Mutator._extend,
    Mutator._extend,
    Mutator._give_one,
    Mutator._drop_one,
)
