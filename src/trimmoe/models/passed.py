"""What a model gives of tokens that pass its layers, and what it says of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from trimmoe.core.specs import IntArray


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """Router output for n tokens.

    The softmax mass of the activated set is `probabilities.gather(1, experts).sum(1)`.
    """

    probabilities: Tensor
    """Softmax over all experts, float32 [n, E]."""
    logits: Tensor
    """float32 [n, E]."""
    experts: Tensor
    """Activated set, int64 [n, k], most probable first."""
    gates: Tensor
    """Weight of each activated expert's output in this model, float32 [n, k].

    Zero where the family drops the token because its expert is full (Switch).
    """
    normed: Tensor
    """What the experts read, [n, d]."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Routing:
        """The same with every tensor changed."""
        return Routing(
            probabilities=change(self.probabilities),
            logits=change(self.logits),
            experts=change(self.experts),
            gates=change(self.gates),
            normed=change(self.normed),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """How far rows came through layers without a decision."""

    layer: int
    """The layer whose slots are to be decided on, or the one before which they stopped."""
    hidden: Tensor
    """[n, d]: after the attention of that layer if there is a `routing`, else before it."""
    routing: Routing | None
    """Of that layer, if it was asked for."""
    experts: IntArray
    """Activated in the layers before it, [n, L, k]."""
    kept: Tensor | None = None
    """What entered the layer that was to be kept, [n, d], if they came so far."""


@dataclass(kw_only=True, slots=True)
class BytesRead:
    """Bytes of the checkpoint's tensors that a view has read so far."""

    dense: int
    experts: int = 0
    """Grows with every layer that a streamed view reads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Widths:
    """How many numbers the states of a token are, by where it is."""

    attended: int
    """Behind attention: what routers, experts and `finish` take."""
    part: int
    """What some of a layer's experts add."""
    moving: int
    """Behind a layer some of whose experts are elsewhere, until all parts are added."""
