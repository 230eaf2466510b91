"""A decoder asked what it calls its layers with, and what it makes of tokens before the first and
of states behind the last."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trimmoe.core.errors import UserError
from trimmoe.models.cache import cache_argument
from trimmoe.models.general.attention import Positions, at
from trimmoe.models.general.passing import Passing
from trimmoe.models.general.ports import Reached


@contextmanager
def quietly() -> Generator[None]:
    """Without transformers' remarks on kernels that could be installed and settings it corrects."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


class Call(NamedTuple):
    """What a decoder hands a layer besides states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Notes(threading.local):
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.stops = False
        """Whether the first layer is as far as it goes."""
        self.given: Tensor | None = None
        """What the last layer gives, if it is not what it is given."""
        self.entered: torch.Size | None = None
        """Shape of the states that the last layer was called with."""


class _Recorder(nn.Module):
    """In a layer's place: notes what it is called with and hands states on."""

    def __init__(self, layer: Any, notes: _Notes, *, last: bool) -> None:
        super().__init__()
        # In a tuple, so that its parameters are not taken for the decoder's.
        self._asked = (layer,)
        self._notes, self._last = notes, last
        self.returns = 1

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_asked"][0], name)

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        notes = self._notes
        if notes.stops:
            raise Reached(hidden)
        notes.calls.append(Call(args, kwargs))
        notes.entered = hidden.shape
        if self._last and notes.given is not None:
            hidden = notes.given
        return hidden if self.returns == 1 else (hidden, *[None] * (self.returns - 1))


class Running:
    """One decoder, its layers taken out."""

    def __init__(self, decoder: Any, layers: tuple[Any, ...]) -> None:
        self.notes = _Notes()
        recorders = [_Recorder(layer, self.notes, last=layer is layers[-1]) for layer in layers]
        decoder.layers = nn.ModuleList(recorders)
        self._decoder, self._recorders = decoder, recorders
        self.argument = cache_argument(decoder)
        self.layer_argument = cache_argument(layers[0])

    def learn(self, through: Passing, positions: Positions, width: int) -> list[Call]:
        """The first `calls`, which finds out how many values the decoder expects of a layer.

        Raises UserError if it can be asked for none, or states are not so wide.
        """
        wanted = (*positions.queries.shape, width)
        for returns in (1, 2, 3):
            for recorder in self._recorders:
                recorder.returns = returns
            try:
                found = self.calls(through, positions)
            except (ValueError, TypeError, AttributeError, IndexError, RuntimeError):
                found = []
            if self.notes.entered not in (None, wanted):
                raise UserError(
                    f"{type(self._decoder).__name__} hands its layers states of shape "
                    f"{list(self.notes.entered or ())} where one state a token would have "
                    f"{list(wanted)}; TrimMoE cannot serve it."
                )
            if len(found) == len(self._recorders):
                return found
        raise UserError(
            f"{type(self._decoder).__name__} does not pass its layers one after the other, each "
            f"with states and nothing that another one made; TrimMoE cannot serve it."
        )

    def calls(self, through: Passing, positions: Positions) -> list[Call]:
        """What the layers are called with for rows at these positions."""
        self.notes.calls = []
        self._run(torch.zeros_like(positions.queries), through, positions)
        return self.notes.calls

    def embedded(self, token_ids: Tensor, through: Passing, positions: Positions) -> Tensor:
        """What enters the first layer, [B, T, d]."""
        self.notes.stops = True
        try:
            self._run(token_ids, through, positions)
        except Reached as reached:
            return reached.values[0]
        finally:
            self.notes.stops = False
        raise AssertionError("a decoder has a layer")

    def ended(self, states: Tensor, through: Passing, positions: Positions) -> Tensor:
        """What leaves the decoder where these states [B, T, d] leave the last layer."""
        self.notes.given = states
        try:
            made = self._run(torch.zeros_like(positions.queries), through, positions)
            return made.last_hidden_state
        finally:
            self.notes.given = None

    def _run(self, token_ids: Tensor, through: Passing, positions: Positions) -> Any:
        with at(positions):
            return self._decoder(
                input_ids=token_ids,
                position_ids=positions.queries,
                use_cache=True,
                **{self.argument: through},
            )
