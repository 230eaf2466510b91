"""Stand-ins for children of a layer, which stop a pass, give it what is known, or leave out work.

A layer of transformers computes attention and experts in one call. Here it is called for either
half: attention's half stops at the module that reads the state after attention; the experts' half
takes attention as done, stops at the experts to say what the router chose, or takes what they gave.
"""

from __future__ import annotations

import threading
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn


class Half(Enum):
    """What of a layer a call is for."""

    WHOLE = auto()
    ATTENTION = auto()
    """Up to the state that the experts' half reads."""
    ROUTE = auto()
    """From that state to the experts."""
    REST = auto()
    """From that state to the layer's output, with what the experts give known."""


class Reached(Exception):
    """A call came as far as it was for; not an error."""

    def __init__(self, *values: Any) -> None:
        super().__init__()
        self.values = values


class Control(threading.local):
    """What the calls of this thread are for."""

    def __init__(self) -> None:
        self.half = Half.WHOLE
        self.given: Tensor | None = None
        """What the experts give, of any shape with n rows; None: nothing."""
        self.logits: Any = None
        """What the router's module gave last."""


class Port(nn.Module):
    """A module in front of another one, which looks like it to whoever asks for its attributes."""

    def __init__(self, inner: nn.Module, control: Control) -> None:
        super().__init__()
        self.inner = inner
        self._control = control

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner(*args, **kwargs)


class MixerPort(Port):
    """Attention, or whatever mixes tokens; it gives nothing, in its own form, where it is done."""

    shape: tuple[int, ...] | None = None
    """Kinds of what the module returns: how many values, if several."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._control.half not in (Half.ROUTE, Half.REST):
            return self.inner(*args, **kwargs)
        nothing = torch.zeros_like(kwargs["hidden_states"] if not args else args[0])
        if self.shape is None:
            return nothing
        return (nothing, *(None for _ in range(self.shape[0] - 1)))


class ReaderPort(Port):
    """The first module that reads the state after attention."""

    def forward(self, state: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._control.half is Half.ATTENTION:
            raise Reached(state)
        return self.inner(state, *args, **kwargs)


class SparedPort(Port):
    """A module that no router needs: left out on the way to the experts."""

    def forward(self, state: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._control.half is Half.ROUTE:
            return state
        return self.inner(state, *args, **kwargs)


class RouterPort(Port):
    """A router whose output is remembered."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = self.inner(*args, **kwargs)
        self._control.logits = found
        return found


class ExpertsPort(nn.Module):
    """In place of the routed experts."""

    def __init__(self, control: Control) -> None:
        super().__init__()
        self._control = control

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *_: Any
    ) -> Tensor:
        control = self._control
        if control.half is Half.ROUTE:
            raise Reached(hidden_states, top_k_index, top_k_weights)
        given = control.given
        if given is None:
            return torch.zeros_like(hidden_states)
        return given.view(hidden_states.shape).to(hidden_states.dtype)


def put(layer: nn.Module, path: str, port: nn.Module) -> None:
    """Set a port in a module's place."""
    parent, _, name = path.rpartition(".")
    home = layer.get_submodule(parent) if parent else layer
    home._modules[name] = port


def mixers(layer: nn.Module) -> list[str]:
    """Children that take a cache."""
    import inspect

    found = []
    for name, child in layer.named_children():
        named = inspect.signature(child.forward).parameters
        if "cache" in named or "past_key_values" in named:
            found.append(name)
    return found
