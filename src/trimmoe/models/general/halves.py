"""One MoE layer, cut in two: attention, and what lies behind it: router, experts, shared ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trimmoe.models.general.layout import SCORES, Layout
from trimmoe.models.general.ports import (
    Control,
    ExpertsPort,
    Half,
    MixerPort,
    Port,
    Reached,
    ReaderPort,
    RouterPort,
    SparedPort,
    put,
)


class Chosen(NamedTuple):
    """What a router chose for n rows."""

    read: Tensor
    """What the experts read, [n, e]."""
    experts: Tensor
    """int64 [n, k]."""
    gates: Tensor
    """[n, k], as the model multiplies with them."""
    logits: Tensor
    """[n, E]."""


class Halves:
    """The halves of one layer of transformers, whose experts are elsewhere."""

    def __init__(
        self, layer: Any, path: str, layout: Layout, control: Control, call: dict[str, Any]
    ) -> None:
        """`call`: what the layer is called with besides states, where attention is done."""
        self.layout = layout
        self._layer, self._control, self._call = layer, control, call
        self._block: Any = None
        self._norm: Any = layer.get_submodule(layout.reader)
        _install(layer, path, layout, control)
        if layout.block is not None:
            self._block = layer.get_submodule(layout.block)

    def attend(self, hidden: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """The state after attention, of the shape of `hidden` [B, T, d]."""
        if self.layout.mixer is None:
            return hidden
        try:
            self._run(Half.ATTENTION, hidden, None, args, kwargs)
        except Reached as reached:
            return reached.values[0].view(hidden.shape)
        raise AssertionError("the experts' half was never begun")

    def chosen(self, state: Tensor) -> Chosen:
        """What the router makes of states after attention, [n, d]."""
        count = state.shape[0]
        try:
            self._behind(Half.ROUTE, state, None)
        except Reached as reached:
            read, experts, gates = reached.values
            logits = self._control.logits
            if self.layout.logits_at is not None:
                logits = logits[self.layout.logits_at]
            return Chosen(
                read=read.reshape(count, -1),
                experts=experts.reshape(count, -1),
                gates=gates.reshape(count, -1),
                logits=logits.reshape(count, -1),
            )
        raise AssertionError("the experts were never asked")

    def read(self, state: Tensor) -> Tensor:
        """What the experts read of states [n, d]: [n, e]."""
        if self.layout.reads == "state":
            return state
        if self.layout.reads == "norm":
            return self._norm(state)
        return self.chosen(state).read

    def rest(self, state: Tensor, given: Tensor | None) -> Tensor:
        """The layer's output, [n, d], where the routed experts `given` [n, e] all they give."""
        made = self._run(Half.REST, state.unsqueeze(0), given, (), self._call)
        return (made[0] if isinstance(made, tuple) else made)[0]

    def shared(self, state: Tensor, normed: Tensor | None) -> Tensor | None:
        """What is added besides the routed experts, [n, d]; None for nothing."""
        if not self.layout.shares:
            return None
        if self._block is None:
            return self.rest(state, None) - state
        made = self._behind(Half.REST, state, normed)
        made = (made[0] if isinstance(made, tuple) else made).reshape(state.shape)
        factor = self.layout.block_factor
        return made if factor == 1.0 else made * factor

    def probabilities(self, logits: Tensor) -> Tensor:
        """Share of each expert in what the router gives all of them, float32 [n, E]."""
        scores = SCORES[self.layout.score or "softmax"](logits.float()).clamp(min=0.0)
        return scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)

    def _behind(self, half: Half, state: Tensor, normed: Tensor | None) -> Any:
        """The experts' half, from the block that holds them if nothing else matters."""
        if self._block is None:
            return self._run(half, state.unsqueeze(0), None, (), self._call)
        rows: Tensor = self._norm(state) if normed is None else normed
        with _set(self._control, half, None):
            return self._block(rows.unsqueeze(0))

    def _run(
        self,
        half: Half,
        hidden: Tensor,
        given: Tensor | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        with _set(self._control, half, given):
            return self._layer(hidden, *args, **kwargs)


class _set:
    """What this thread's calls are for, meanwhile."""

    __slots__ = ("_control", "_given", "_half")

    def __init__(self, control: Control, half: Half, given: Tensor | None) -> None:
        self._control, self._half, self._given = control, half, given

    def __enter__(self) -> None:
        self._control.half, self._control.given = self._half, self._given

    def __exit__(self, *_: object) -> None:
        self._control.half, self._control.given = Half.WHOLE, None


def _install(layer: Any, path: str, layout: Layout, control: Control) -> None:
    """Ports in the places that the layout names, inner ones first."""
    ports: list[tuple[str, type[Port]]] = [(name, SparedPort) for name in layout.spared]
    ports.append((layout.reader, ReaderPort))
    if layout.router is not None:
        ports.append((layout.router, RouterPort))
    if layout.mixer is not None:
        ports.append((layout.mixer, MixerPort))
    put(layer, path, ExpertsPort(control))
    for name, kind in sorted(ports, key=lambda one: -one[0].count(".")):
        port = kind(layer.get_submodule(name), control)
        if isinstance(port, MixerPort) and layout.mixer_returns is not None:
            port.shape = (layout.mixer_returns,)
        put(layer, name, port)


def take_parameters(module: nn.Module) -> None:
    """Leave a module without parameters of its own."""
    for name in [name for name, _ in module.named_parameters()]:
        home, _, last = name.rpartition(".")
        module.get_submodule(home)._parameters.pop(last)


@torch.no_grad()
def without_cache(call: dict[str, Any], argument: str) -> dict[str, Any]:
    """What a layer is called with where attention is done."""
    return {name: None if name == argument else value for name, value in call.items()}
