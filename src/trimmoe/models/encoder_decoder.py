"""What a model with an encoder offers beside what all do."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence

from torch import Tensor

from trimmoe.models.base import MoEView
from trimmoe.models.cache import KVCache


class EncoderDecoderView(MoEView):
    """A model whose generated tokens pass the decoder: the view itself is the decoder.

    The encoder is a view of its own, with its own MoE layers and experts. It attends both ways
    and keeps no cache, so every token of a sequence has to be in every call of its `attend`;
    its `propagate` does nothing.
    """

    encoder: MoEView
    start_token: int
    """What the decoder's first position holds."""

    @abstractmethod
    def encode(self, sources: Sequence[Sequence[int]]) -> list[Tensor]:
        """Run the encoder with every expert exact: token ids to states [S_b, d]."""

    @abstractmethod
    def states(self, hidden: Tensor) -> Tensor:
        """The encoder's final norm, after its `tail`: [n, d]."""

    @abstractmethod
    def attach(
        self,
        cache: KVCache,
        slot: int,
        states: Tensor,
        *,
        layers: Collection[int] | None = None,
    ) -> None:
        """Give a slot the encoder's states [S, d] to attend to, before its first token.

        `layers` names the MoE layers that are served here (None: all); the blocks after the last
        one belong to it.
        """
