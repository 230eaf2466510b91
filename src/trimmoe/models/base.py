"""What a MoE model offers to the rest of TrimMoE, whatever its family.

How a token passes MoE layer `l` (`d` the hidden size, `k` the activated experts):

    hidden = view.attend(l, hidden, batch, cache)      # [B, T, d]; dense blocks before l included
    flat = batch.pack(hidden)                          # [n, d], the padding left out
    routing = view.route(l, flat)
    shared = view.shared(l, flat, normed=routing.normed)
    routed = view.experts(l, flat, routing.experts, routing.gates, normed=routing.normed)
    hidden = batch.unpack(view.finish(l, flat, shared, routed))

and after the last layer

    flat = batch.pack(view.tail(hidden, batch, cache)) # dense blocks after the last MoE layer
    logits = view.logits(flat)                         # [n, V]

A *skipped* token calls `finish` with `routed=None`, or just `skip`. An *exited* token calls
`logits` on the state it left with, and later tokens attend to what it leaves in the layers it did
not run. Either it goes on as if it skipped each of them, `tail` included, or its state stands
still: `propagate` for every later layer, and `propagate_tail` once. It passes a layer before a
later token of the same sequence attends there.

`hidden` is always the residual stream. `normed` (the output of the norm before the experts) may be
handed on to save computing it again, and must then belong to the same rows; where a hidden vector
came over the wire, leave it out and the view computes it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from trimmoe.core.specs import BoolArray, IntArray, ModelSpec
from trimmoe.models.batch import TokenBatch
from trimmoe.models.cache import KVCache
from trimmoe.models.passed import BytesRead, Routing, Segment, Widths
from trimmoe.models.sums import sums_in

if TYPE_CHECKING:
    from trimmoe.models.draft_chains import AnyHead

DROPPED = -1
"""Expert number of a slot that runs nothing."""


class MoEView(ABC):
    """A loaded model, layer by layer; only the experts it was opened with can run.

    A streamed view reads a layer's experts when they are first asked for and lets them go when
    another layer's are, so that it pays to take everything through a layer before the next.

    No method keeps gradients. Nothing here is safe for use by two threads on one cache.
    """

    shared_by_threads: bool = False
    """Whether several threads may use it at once, each with a cache of its own."""

    spec: ModelSpec
    dtype: torch.dtype
    device: torch.device
    bytes_read: BytesRead
    stand_in_bits: IntArray | None = None
    """Bits of the copies that it was opened with of experts that are not loaded, [N, E]."""
    draft_head: AnyHead | None = None
    """What guesses on from this model's states."""

    @property
    @abstractmethod
    def loaded(self) -> tuple[frozenset[int], ...]:
        """Experts that can run, by layer."""

    @property
    def widths(self) -> Widths:
        """All of them the hidden size, unless a layer does more with what experts give than add
        it."""
        size = self.spec.hidden_size
        return Widths(attended=size, part=size, moving=size)

    @property
    def rewinds(self) -> bool:
        """Whether a sequence can be cut back to any position, and another one go on from there."""
        return True

    @property
    def chains(self) -> bool:
        """Whether tokens that follow one another in a sequence may pass a layer in one step of
        decoding, each to the same bits as by itself."""
        return False

    @abstractmethod
    def let_go(self) -> None:
        """Give back the memory of what a streamed view reads again when it is asked for."""

    def have_copies(self, bits: IntArray) -> bool:
        """Whether `experts` and its like run copies of experts in so many bits [N, E], 0 for none,
        as `core.stand_ins` numbers them. Those of loaded experts are made here."""
        return False

    def fit_copies(self, squares: NDArray[np.float32] | None) -> None:  # noqa: B027
        """Have copies from here on fitted to what experts read, mean squares [N, d]; None: nothing
        is known of that."""

    def drop_copies(self) -> None:  # noqa: B027
        """Hold no copies any more."""

    def use_threads(self, threads: int) -> None:  # noqa: B027
        """How many threads a call may use, where torch does not decide; what is computed is the
        same, bit for bit."""

    @abstractmethod
    def new_cache(self, *, slots: int) -> KVCache:
        """An empty cache for `slots` sequences; memory is taken as layers are first written."""

    @abstractmethod
    def batch(
        self, cache: KVCache, slots: Sequence[int], positions: Sequence[Sequence[int]]
    ) -> TokenBatch:
        """Describe one step: row b holds tokens of the sequence in `slots[b]` at `positions[b]`.

        Positions increase within a row; they need not start at 0 nor be consecutive. Raises
        UserError beyond the context length.
        """

    @abstractmethod
    def embed(self, token_ids: Tensor, batch: TokenBatch) -> Tensor:
        """Token ids [B, T] to hidden states [B, T, d]."""

    @abstractmethod
    def attend(self, layer: int, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> Tensor:
        """Dense blocks before the layer, then its attention with the residual: [B, T, d].

        Writes the keys and values of all of them.
        """

    @abstractmethod
    def attend_whatif(
        self, layer: int, hidden: Tensor, positions: Tensor, slot: int, cache: KVCache
    ) -> Tensor:
        """`attend` for S independent queries [S, d] into one cached sequence, writing nothing.

        Query s sees the cached keys before `positions[s]` and its own. Raises NotImplementedError
        for families without it.
        """

    @abstractmethod
    def route(self, layer: int, hidden: Tensor, *, groups: Tensor | None = None) -> Routing:
        """Route n tokens [n, d].

        `groups` [n] says which sequence a row belongs to, for families that limit how many tokens
        of one sequence an expert takes in one call (Switch); None: each row is its own.
        """

    @abstractmethod
    def shared(self, layer: int, hidden: Tensor, *, normed: Tensor | None = None) -> Tensor | None:
        """What the shared expert adds, [n, d]; None if the family has none."""

    @abstractmethod
    def experts(
        self,
        layer: int,
        hidden: Tensor,
        experts: Tensor,
        gates: Tensor,
        *,
        normed: Tensor | None = None,
    ) -> Tensor:
        """Sum over the slots of gate times expert, [n, d] in `sums_in` of the view's dtype, from
        experts and gates [n, k].

        A slot with expert -1 adds nothing. Raises `ExpertNotLoaded` for an expert that this view
        was opened without.
        """

    def finish(
        self, layer: int, hidden: Tensor, shared: Tensor | None, routed: Tensor | None
    ) -> Tensor:
        """The layer's output: the residual plus what the experts gave, rounded once."""
        base = hidden if shared is None else hidden + shared
        if routed is None:
            return base
        return (base.to(sums_in(self.dtype, self.device)) + routed).to(self.dtype)

    def give(
        self,
        layer: int,
        hidden: Tensor,
        experts: IntArray,
        gates: Tensor,
        *,
        normed: Tensor | None = None,
    ) -> Tensor:
        """The layer's output, [n, d], as far as the experts [n, k] give it, all of them loaded, and
        the shared one; -1 in place of an expert adds nothing."""
        return self.gathered(layer, hidden, experts, gates, normed=normed).to(self.dtype)

    def gathered(
        self,
        layer: int,
        hidden: Tensor,
        experts: IntArray,
        gates: Tensor,
        *,
        normed: Tensor | None = None,
    ) -> Tensor:
        """What `give` rounds, in `sums_in` of the view's dtype: the `experts` that other servers
        run can be added, in any order."""
        total = self.skip(layer, hidden, normed=normed).to(sums_in(self.dtype, self.device))
        if (experts >= 0).any():
            chosen = torch.from_numpy(experts).to(hidden.device)
            total = total + self.experts(layer, hidden, chosen, gates, normed=normed)
        return total

    def gathered_part(
        self,
        layer: int,
        hidden: Tensor,
        experts: IntArray,
        gates: Tensor,
        *,
        normed: Tensor | None = None,
    ) -> Tensor:
        """The same where other experts are elsewhere, [n, moving]: what they give is added to the
        last `part` columns, and `whole` makes the layer's output of it."""
        return self.gathered(layer, hidden, experts, gates, normed=normed)

    def whole(self, layer: int, moved: Tensor) -> Tensor:
        """The layer's output, [n, d], of what `gathered_part` gave with all parts added."""
        return moved

    def skip(self, layer: int, hidden: Tensor, *, normed: Tensor | None = None) -> Tensor:
        """The layer's output where none of its routed experts runs, [n, d] to [n, d]."""
        return self.finish(layer, hidden, self.shared(layer, hidden, normed=normed), None)

    def run(
        self,
        first: int,
        last: int,
        hidden: Tensor,
        batch: TokenBatch,
        cache: KVCache,
        settled: BoolArray,
        kept_at: int | None = None,
    ) -> Segment:
        """Take rows [n, d] from before layer `first` through the layers up to `last`, exclusive.

        `settled` [N, E] says which experts run here without a decision; where another one is
        activated, all rows stop behind the router. `tail` is not part of any layer. What enters
        the layer `kept_at` is given back too.
        """
        passed: list[IntArray] = []
        kept: Tensor | None = None
        groups = None if batch.shape[1] == 1 else batch.groups
        for layer in range(first, last):
            kept = hidden if layer == kept_at else kept
            attended = batch.pack(self.attend(layer, batch.unpack(hidden), batch, cache))
            routing = self.route(layer, attended, groups=groups)
            experts = routing.experts.cpu().numpy()
            if not settled[layer][experts].all():
                return Segment(
                    layer=layer,
                    hidden=attended,
                    routing=routing,
                    experts=_by_row(passed, experts),
                    kept=kept,
                )
            hidden = self.through(layer, attended, routing)
            passed.append(experts)
        like = np.empty((hidden.shape[0], self.spec.top_k), dtype=np.int64)
        ran = _by_row(passed, like)
        return Segment(layer=last, hidden=hidden, routing=None, experts=ran, kept=kept)

    def through(self, layer: int, attended: Tensor, routing: Routing) -> Tensor:
        """The layer's output of rows [n, d] all of whose activated experts run here."""
        normed = routing.normed
        shared = self.shared(layer, attended, normed=normed)
        routed = self.experts(layer, attended, routing.experts, routing.gates, normed=normed)
        return self.finish(layer, attended, shared, routed)

    @abstractmethod
    def propagate(self, layer: int, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> None:
        """State propagation: write the keys and values that `hidden` [B, T, d] has in this layer.

        Those of the dense blocks before it too, from the same hidden state. No attention runs.
        """

    @abstractmethod
    def tail(self, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> Tensor:
        """Dense blocks after the last MoE layer, [B, T, d]; the input itself if there are none."""

    @abstractmethod
    def tail_whatif(self, hidden: Tensor, positions: Tensor, slot: int, cache: KVCache) -> Tensor:
        """`tail` for what-if queries [S, d]."""

    @abstractmethod
    def propagate_tail(self, hidden: Tensor, batch: TokenBatch, cache: KVCache) -> None:
        """State propagation for the dense blocks after the last MoE layer."""

    @abstractmethod
    def head(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What `logits` multiplies: the normed states [n, d] and the head's rows [V, d]."""

    def normed_last(self, hidden: Tensor) -> Tensor:
        """The states that the head reads, [n, d] to [n, d]."""
        return self.head(hidden)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: [n, d] to [n, V], in the view's dtype."""
        return F.linear(*self.head(hidden))


def _by_row(passed: list[IntArray], like: IntArray) -> IntArray:
    """Activated sets of layers, [n, k] each as `like`, by row: [n, L, k]."""
    return np.stack(passed, axis=1) if passed else np.empty((like.shape[0], 0, like.shape[1]), int)


class ExpertNotLoaded(AssertionError):
    """An expert was asked of a view that was opened without it."""
