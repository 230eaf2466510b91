"""What batches run with, whatever the engine decides of their rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from trimmoe.models.base import MoEView
from trimmoe.models.batch import TokenBatch
from trimmoe.models.encoder_decoder import EncoderDecoderView
from trimmoe.runtime.node.compute.pace import Pace
from trimmoe.runtime.node.compute.states import leaving
from trimmoe.runtime.node.compute.verifying import Verifier
from trimmoe.runtime.node.records.messages import Parcel
from trimmoe.runtime.node.records.output import BatchOutput
from trimmoe.runtime.node.records.units import Unit

_KEPT_BATCHES = 16


class ModelRunner:
    """The model with its cache; `server` is this server's index."""

    def __init__(
        self,
        view: MoEView,
        *,
        server: int,
        slots: int,
        pace: Pace | None = None,
        verifier: Verifier | None = None,
    ) -> None:
        self.view, self.server = view, server
        self.cache = view.new_cache(slots=slots)
        self.pace = pace or Pace()
        self.verifier = verifier or Verifier.idle()
        self.send: Callable[[list[Parcel]], None] | None = None
        """Sends what can leave before its batch is through; without it nothing does."""
        self._batches: dict[tuple[tuple[int, ...], tuple[int, ...]], TokenBatch] = {}

    def batch(self, units: Sequence[Unit]) -> TokenBatch:
        """The units' rows as one step; the same units pass many layers together."""
        slots = tuple(unit.seat.slot for unit in units)
        key = (slots, tuple(unit.start for unit in units))
        if any(unit.count > 1 for unit in units):
            return self.view.batch(self.cache, slots, [unit.positions for unit in units])
        if key not in self._batches:
            if len(self._batches) >= _KEPT_BATCHES:
                self._batches.clear()
            self._batches[key] = self.view.batch(
                self.cache, slots, [unit.positions for unit in units]
            )
        return self._batches[key]

    @torch.inference_mode()
    def attach(self, slot: int, encoded: Tensor, layers: list[int]) -> None:
        """Have a slot attend, in some layers, to what an encoder made of a prompt, [S, d]."""
        view = self.view
        assert isinstance(view, EncoderDecoderView)
        states = encoded.to(device=view.device, dtype=view.dtype)
        view.attach(self.cache, slot, states, layers=layers)
        # A step knows how much its rows attend to: those kept are of what was there before.
        self._batches.clear()

    def emit(self, parcels: list[Parcel], result: BatchOutput) -> None:
        """Send parcels now if that is possible, or with the rest of the result."""
        if self.send is None:
            result.parcels += parcels
        elif parcels:
            self.send(leaving(parcels))
