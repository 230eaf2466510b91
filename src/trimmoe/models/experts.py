"""The routed experts that can run here, stacked by layer; in memory, or read when needed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from trimmoe.models import together
from trimmoe.models.base import DROPPED, ExpertNotLoaded
from trimmoe.models.sums import sums_in

Activation = Callable[[Tensor], Tensor]
ReadLayer = Callable[[int], "ExpertStack"]
"""Reads the experts of one layer from the checkpoint."""
ReadExperts = Callable[[int, Collection[int]], "ExpertStack"]
"""Reads some experts of a layer, in order."""

_ONE_BY_ONE = 8
"""Up to this many activated slots it is quicker to run each by itself than to group tokens."""


class ExpertStack:
    """Experts `ids` of one layer: `up` [E, g, d] and `down` [E, d, f].

    With gated experts g = 2f, the gate's rows before the up projection's; otherwise g = f. Where
    the `activation` is the `whole` of what lies between the two, it takes [n, g] and gives [n, f].
    Biases are [E, g] and [E, d].
    """

    def __init__(
        self,
        *,
        layer: int,
        ids: Sequence[int],
        up: Tensor,
        down: Tensor,
        activation: Activation,
        up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
        whole: bool = False,
        weighs_input: bool = False,
    ) -> None:
        """`weighs_input`: whether gates multiply what experts read instead of what they give."""
        assert len(ids) == up.shape[0] == down.shape[0]
        self.layer = layer
        self.ids = frozenset(ids)
        self.order = tuple(ids)
        """The experts as they are stacked."""
        self.up = up
        self.down = down
        self.up_bias, self.down_bias = up_bias, down_bias
        # Views made once: at one token, slicing would cost a good part of the product.
        self._ups = up.unbind(0)
        self._downs = down.unbind(0)
        self.up_biases = _each(up_bias, len(ids))
        self.down_biases = _each(down_bias, len(ids))
        self._index = {expert: index for index, expert in enumerate(ids)}
        self._activation = activation
        self._weighs_input = weighs_input
        self._gated = not whole and up.shape[1] == 2 * down.shape[2]
        self._groups = together.can_group(up.device, *up.shape[1:], down.shape[2])
        self._places = _places(ids, up.device) if self._groups else None

    def asks_nobody(self, slots: int) -> bool:
        """Whether so many slots, all of experts that are here, run without a word to the processor,
        so that they can be recorded."""
        return self._groups and self._fits(slots)

    def _fits(self, slots: int) -> bool:
        """Whether slots run together at no more memory than they are worth."""
        each = self.up[0].nbytes + self.down[0].nbytes
        return self.up.dtype is torch.bfloat16 or slots * each <= together.GATHERED_BYTES

    def unasked(self, normed: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        """A call, where `asks_nobody` and all experts are known to be here."""
        return self._together(normed, experts, gates, here=True)

    def __call__(self, normed: Tensor, experts: Tensor, gates: Tensor) -> Tensor:
        """Sum over slots of gate times expert: [n, d], as in `MoEView.experts`, from [n, d], int64
        [n, k], [n, k]."""
        if self._groups and self._fits(experts.numel()):
            return self._together(normed, experts, gates)
        chosen = experts.tolist()
        if len(chosen) == 1 and len(chosen[0]) <= _ONE_BY_ONE:
            return self._one_token(normed, chosen[0], gates)
        return self._many_tokens(normed, chosen, gates)

    def _one_token(self, normed: Tensor, chosen: list[int], gates: Tensor) -> Tensor:
        """One token: no weight is copied, one small product per slot."""
        kept = [slot for slot, expert in enumerate(chosen) if expert != DROPPED]
        if not kept:
            return torch.zeros_like(normed, dtype=sums_in(normed.dtype, normed.device))
        at = [self._at(chosen[slot]) for slot in kept]
        if self._weighs_input:
            read = [normed * gates[:, slot : slot + 1].to(normed.dtype) for slot in kept]
            gates = torch.ones_like(gates)
        else:
            read = [normed] * len(kept)
        ups = [self._up(rows, index) for rows, index in zip(read, at, strict=True)]
        inner = self._act(torch.cat(ups))
        outer = torch.cat([self._down(inner[row : row + 1], index) for row, index in enumerate(at)])
        weights = gates if len(kept) == len(chosen) else gates[:, kept]
        return _addends(outer, weights.view(-1, 1)).sum(0, keepdim=True)

    def _many_tokens(self, normed: Tensor, chosen: list[list[int]], gates: Tensor) -> Tensor:
        """Tokens grouped by expert."""
        width = gates.shape[1]
        flat_gates = gates.reshape(-1)
        out = normed.new_zeros(normed.shape, dtype=sums_in(normed.dtype, normed.device))
        for index, slots in self._group(chosen, width).items():
            where = torch.tensor(slots, device=normed.device)
            rows = where if width == 1 else where // width
            read = normed.index_select(0, rows)
            weights = flat_gates.index_select(0, where).unsqueeze(-1)
            if self._weighs_input:
                read, weights = read * weights.to(read.dtype), torch.ones_like(weights)
            outer = self._down(self._act(self._up(read, index)), index)
            out.index_add_(0, rows, _addends(outer, weights))
        return out

    def _together(
        self, normed: Tensor, experts: Tensor, gates: Tensor, *, here: bool = False
    ) -> Tensor:
        """All slots at once; those that run nothing run any expert, at a weight of zero."""
        width, asked = experts.shape[1], experts.reshape(-1)
        index = self._indices(asked, here)
        weights = gates.reshape(-1).masked_fill(asked == DROPPED, 0.0).unsqueeze(-1)
        read = normed.repeat_interleave(width, 0, output_size=asked.numel())
        if self._weighs_input:
            read = read * weights.to(read.dtype)
            weights = (asked != DROPPED).to(weights.dtype).unsqueeze(-1)

        def run(rows: Tensor, at: Tensor, ends: Tensor) -> Tensor:
            inner = together.products(rows, self.up, at, ends)
            inner = self._act(inner if self.up_bias is None else inner + self.up_bias[at])
            outer = together.products(inner, self.down, at, ends)
            return outer if self.down_bias is None else outer + self.down_bias[at]

        outer = together.apart(read, index, len(self.order), run)
        return _addends(outer, weights).view(-1, width, outer.shape[1]).sum(1)

    def _indices(self, asked: Tensor, here: bool) -> Tensor:
        """Where experts [S] are in the stack; 0 for those that run nothing."""
        if self._places is None:
            return asked.clamp(min=0)
        if here:
            return self._places[asked]
        most = len(self._places) - 1
        index = self._places[asked.clamp(max=most)].masked_fill(asked > most, DROPPED)
        index = index.masked_fill(asked == DROPPED, 0)
        if (index == DROPPED).any():
            missing = asked[index == DROPPED][0].item()
            raise ExpertNotLoaded(f"expert {missing} of layer {self.layer} is not loaded here")
        return index

    def _group(self, chosen: list[list[int]], width: int) -> dict[int, list[int]]:
        """Flat slot numbers by index into the stack."""
        groups: dict[int, list[int]] = {}
        for row, slots in enumerate(chosen):
            for slot, expert in enumerate(slots):
                if expert != DROPPED:
                    groups.setdefault(self._at(expert), []).append(row * width + slot)
        return groups

    def _at(self, expert: int) -> int:
        try:
            return self._index[expert]
        except KeyError:
            raise ExpertNotLoaded(
                f"expert {expert} of layer {self.layer} is not loaded here"
            ) from None

    def _up(self, rows: Tensor, index: int) -> Tensor:
        return F.linear(rows, self._ups[index], self.up_biases[index])

    def _down(self, inner: Tensor, index: int) -> Tensor:
        return F.linear(inner, self._downs[index], self.down_biases[index])

    def _act(self, inner: Tensor) -> Tensor:
        if not self._gated:
            return self._activation(inner)
        gate, up = inner.chunk(2, dim=-1)
        return self._activation(gate) * up


def _addends(outer: Tensor, weights: Tensor) -> Tensor:
    """Experts' outputs [s, d] times their weights [s, 1], rounded to their own dtype, as numbers to
    be added up."""
    return (outer * weights).to(outer.dtype).to(sums_in(outer.dtype, outer.device))


def _each(bias: Tensor | None, count: int) -> Sequence[Tensor | None]:
    """The bias of each expert, none if there is none."""
    return [None] * count if bias is None else bias.unbind(0)


def _places(ids: Sequence[int], device: torch.device) -> Tensor | None:
    """Where each expert is in a stack, by its number; None if that is its number."""
    if list(ids) == list(range(len(ids))):
        return None
    places = torch.full((max(ids) + 1,), DROPPED, device=device)
    places[torch.tensor(list(ids), device=device)] = torch.arange(len(ids), device=device)
    return places


class ExpertStacks:
    """The experts of all layers: read at once and kept, or streamed, one layer at a time."""

    def __init__(
        self, loaded: Sequence[frozenset[int]], read: ReadLayer, *, streamed: bool
    ) -> None:
        """`loaded` are the experts of each layer that may be asked for."""
        self.loaded = tuple(loaded)
        self._read = read
        self.streamed = streamed
        here = () if streamed else [layer for layer, ids in enumerate(self.loaded) if ids]
        self._held = {layer: read(layer) for layer in here}

    @property
    def held(self) -> frozenset[int]:
        """Layers whose experts are in memory now."""
        return frozenset(self._held)

    def __getitem__(self, layer: int) -> ExpertStack:
        """A layer's experts. Raises ExpertNotLoaded if there are none, UserError if they have to
        be read and cannot."""
        found = self._held.get(layer)
        return self._turned_to(layer) if found is None else found

    def let_go(self) -> None:
        """Hold nothing that can be read again."""
        if self.streamed:
            self._held.clear()

    def _turned_to(self, layer: int) -> ExpertStack:
        if not self.loaded[layer]:
            raise ExpertNotLoaded(f"no expert of layer {layer} is loaded here")
        # First, or two layers would be in memory.
        self.let_go()
        self._held[layer] = self._read(layer)
        return self._held[layer]
