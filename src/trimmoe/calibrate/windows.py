"""Windows of text, and a layer run for their tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from trimmoe.core.specs import IntArray
from trimmoe.models.base import MoEView
from trimmoe.models.passed import Routing


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """Independent sequences of equal length; token t is ids[t // length, t % length]."""

    ids: IntArray
    """Token ids that the (decoder's) layers see, [W, length]."""
    sources: IntArray | None = None
    """The encoder's inputs where there is an encoder, [W, source length]."""

    @property
    def count(self) -> int:
        return self.ids.shape[0]

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    @property
    def tokens(self) -> int:
        return self.ids.size

    def part(self, first: int, last: int) -> Windows:
        """Windows first to last, the last one excluded."""
        return self.take(np.arange(self.count)[first:last])

    def take(self, index: IntArray) -> Windows:
        """The windows of these indices, which may repeat."""
        sources = None if self.sources is None else self.sources[index]
        return Windows(ids=self.ids[index], sources=sources)


def run_layer(
    view: MoEView, layer: int, attended: Tensor, routing: Routing, experts: Tensor
) -> Tensor:
    """Shared and routed experts of one layer, [n, d] to [n, d].

    `experts` [n, k] may differ from the routing's own; the gates stay the routing's.
    """
    shared = view.shared(layer, attended, normed=routing.normed)
    routed = view.experts(layer, attended, experts, routing.gates, normed=routing.normed)
    return view.finish(layer, attended, shared, routed)
