"""How a layer makes its output, found by running it on a few random states.

With attention giving nothing, the state that goes in is the state after attention, if the layer
adds attention to its input as nearly all do. What the experts give is added to it, times a constant
perhaps, or passes a norm first. All of this is asked of a float32 copy of the layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trimmoe.core.errors import UserError
from trimmoe.models.general.layout import SCORES, Layout
from trimmoe.models.general.ports import (
    Control,
    ExpertsPort,
    Half,
    MixerPort,
    Reached,
    mixers,
    put,
)

_ROWS = 8
_CLOSE = 1e-4


def find(
    layer: nn.Module, experts_path: str, expert_count: int, width: int, call: dict[str, Any]
) -> Layout:
    """The layout of a layer whose experts are taken out, `call` being what it is called with
    besides states.

    Raises UserError if it does not add attention to its input, or keeps state elsewhere.
    """
    with torch.no_grad():
        return _Trial(layer, experts_path, expert_count, width, call).run()


class _Trial:
    def __init__(
        self, layer: nn.Module, path: str, count: int, width: int, call: dict[str, Any]
    ) -> None:
        self.kind = type(layer).__name__
        self.layer: Any = copy.deepcopy(layer).float()
        self.path, self.count, self.call = path, count, call
        self.control = Control()
        put(self.layer, path, ExpertsPort(self.control))
        device = next(self.layer.parameters()).device
        generator = torch.Generator().manual_seed(0)
        self.state = torch.randn(1, _ROWS, width, generator=generator).to(device)
        self.random = torch.randn(2, _ROWS, width, generator=generator).to(device)

    def run(self) -> Layout:
        mixer, returns = self._mixer()
        reader = self._reader(mixer)
        read, index, gates = self._routed()
        given = torch.randn(2, *read.shape, generator=torch.Generator().manual_seed(1)).to(
            read.device
        )
        plain, *outputs = (self._output(one) for one in (None, *given))
        factor = self._factor(given, plain, outputs)
        normed = self._normed(reader)
        block, block_factor = self._block(normed, given[0], outputs[0])
        router, at, score = self._router(index, gates)
        return Layout(
            mixer=mixer,
            mixer_returns=returns,
            reader=reader,
            router=router,
            logits_at=at,
            score=score,
            spared=self._spared(reader, (read, index, gates)),
            experts_read=read.shape[-1],
            reads=self._reads(read, normed),
            factor=factor,
            shares=not _close(plain, self.state),
            block=block,
            block_factor=block_factor,
        )

    def _normed(self, reader: str) -> Tensor | None:
        """What the reader gives, if it is not what holds the experts itself."""
        if reader == self.path.partition(".")[0]:
            return None
        made = self.layer.get_submodule(reader)(self.state)
        return made if isinstance(made, Tensor) and made.shape == self.state.shape else None

    def _reads(self, read: Tensor, normed: Tensor | None) -> str | None:
        """See `Layout.reads`."""
        if _same(read, self.state):
            return "state"
        return "norm" if normed is not None and _same(read, normed) else None

    def _mixer(self) -> tuple[str | None, int | None]:
        names = [name for name in mixers(self.layer) if self._is_called(name)]
        if len(names) > 1:
            raise UserError(
                f"{self.kind} keeps state in {' and '.join(names)}; TrimMoE serves layers that "
                f"keep it in attention only."
            )
        if not names:
            return None, None
        (name,) = names
        found: list[Any] = []
        with _watched(self.layer, [name], lambda _, __, ___, output: found.append(output)):
            self._call(self.state, Half.WHOLE)
        port = MixerPort(self.layer.get_submodule(name), self.control)
        returns = len(found[0]) if isinstance(found[0], tuple) else None
        port.shape = None if returns is None else (returns,)
        put(self.layer, name, port)
        return name, returns

    def _is_called(self, name: str) -> bool:
        called: list[bool] = []
        with _watched(self.layer, [name], lambda *_: called.append(True)):
            self._call(self.state, Half.WHOLE)
        return bool(called)

    def _reader(self, mixer: str | None) -> str:
        """The first child behind the mixer that reads just what went in."""
        seen: list[tuple[str, Tensor | None]] = []

        def note(name: str, args: Any, kwargs: Any, _: Any) -> None:
            states = [*args, *kwargs.values()]
            seen.append((name, next((one for one in states if isinstance(one, Tensor)), None)))

        names = [name for name, _ in self.layer.named_children()]
        with _watched(self.layer, names, note):
            self._output(None)
        behind = [name for name, _ in seen].index(mixer) + 1 if mixer else 0
        reader = next((name for name, read in seen[behind:] if _same(read, self.state)), None)
        if reader is None or not self._adds(mixer, reader):
            raise UserError(
                f"{self.kind} does not just add attention to the state that goes on; TrimMoE "
                f"serves layers that do."
            )
        return reader

    def _adds(self, mixer: str | None, reader: str) -> bool:
        """Whether the layer goes on from the state that the reader reads, whatever attention
        gave."""
        if mixer is None:
            return True
        port: Any = self.layer.get_submodule(mixer)
        returns = port.shape
        given = self.random[:1]

        class Fixed(nn.Module):
            def forward(self, *_: Any, **__: Any) -> Any:
                return given if returns is None else (given, *[None] * (returns[0] - 1))

        read: list[Tensor] = []
        put(self.layer, mixer, Fixed())
        with _watched(self.layer, [reader], lambda _, args, __, ___: read.append(args[0])):
            whole = self._output(self.random[1])
        put(self.layer, mixer, port)
        return bool(read) and _close(self._output(self.random[1], read[0]), whole)

    def _routed(self) -> tuple[Tensor, Tensor, Tensor]:
        try:
            self._call(self.state, Half.ROUTE)
        except Reached as reached:
            read, index, gates = reached.values
            return read.reshape(_ROWS, -1), index.reshape(_ROWS, -1), gates.reshape(_ROWS, -1)
        raise UserError(f"{self.kind} gives its experts nothing to do.")

    def _factor(self, given: Tensor, plain: Tensor, outputs: list[Tensor]) -> float | None:
        """See `Layout.factor`."""
        if given[0].numel() != plain.numel():
            return None
        added = (outputs[0] - plain).reshape(given[0].shape)
        factor = float((added * given[0]).sum().double() / given[0].square().sum().double())
        both = (
            _close(output - plain, factor * one.reshape(plain.shape))
            for output, one in zip(outputs, given, strict=True)
        )
        return _rounded(factor) if all(both) else None

    def _block(
        self, normed: Tensor | None, given: Tensor, output: Tensor
    ) -> tuple[str | None, float]:
        """See `Layout.block`."""
        name = self.path.partition(".")[0]
        if name == self.path or normed is None:
            return None, 1.0
        gave: list[Tensor] = []

        def note(_: str, __: Any, ___: Any, made: Any) -> None:
            gave.append(made[0] if isinstance(made, tuple) else made)

        with _watched(self.layer, [name], note):
            self._output(given)
        added, made = output - self.state, gave[0].reshape(output.shape)
        factor = _rounded(
            float((added * made).sum().double() / made.square().sum().double().clamp(min=1e-30))
        )
        if not _close(added, factor * made):
            return None, 1.0
        alone = self._alone(name, normed, given)
        return (name, factor) if alone is not None and _close(alone, made) else (None, 1.0)

    def _alone(self, name: str, normed: Tensor, given: Tensor) -> Tensor | None:
        """What the child gives if nothing but the normed states go in."""
        self.control.half, self.control.given = Half.REST, given
        try:
            made = self.layer.get_submodule(name)(normed)
        except TypeError:
            return None
        finally:
            self.control.half, self.control.given = Half.WHOLE, None
        return (made[0] if isinstance(made, tuple) else made).reshape(normed.shape)

    def _router(self, index: Tensor, gates: Tensor) -> tuple[str | None, int | None, str | None]:
        """Where logits come from, and what of them gates are in proportion to."""
        found: list[tuple[str, int | None, Tensor]] = []

        def note(name: str, _: Any, __: Any, output: Any) -> None:
            values = output if isinstance(output, tuple) else (output,)
            for at, value in enumerate(values):
                if (
                    isinstance(value, Tensor)
                    and value.is_floating_point()
                    and value.shape[-1] == self.count
                    and value.numel() == _ROWS * self.count
                ):
                    place = at if isinstance(output, tuple) else None
                    found.append((name, place, value.reshape(_ROWS, -1)))

        names = [name for name, _ in self.layer.named_modules() if name]
        with _watched(self.layer, names, note):
            self._routed()
        for router, at, logits in found:
            for score, of in SCORES.items():
                if _in_proportion(of(logits.float()), index, gates):
                    return router, at, score
        return (*found[0][:2], None) if found else (None, None, None)

    def _spared(self, reader: str, routed: tuple[Tensor, ...]) -> tuple[str, ...]:
        """Modules with weights without whose output the router chooses the same."""
        first = self.path.partition(".")[0]
        names = [name for name, _ in self.layer.named_children() if name not in (first, reader)]
        inner = [name for name, _ in self.layer.get_submodule(first).named_children()]
        names += [f"{first}.{name}" for name in inner if f"{first}.{name}" != self.path]
        return tuple(name for name in names if self._can_be_spared(name, routed))

    def _can_be_spared(self, name: str, routed: tuple[Tensor, ...]) -> bool:
        child = self.layer.get_submodule(name)
        if isinstance(child, MixerPort) or not any(p.dim() > 1 for p in child.parameters()):
            return False

        class Nothing(nn.Module):
            def forward(self, state: Tensor, *_: Any, **__: Any) -> Tensor:
                return state

        put(self.layer, name, Nothing())
        try:
            return all(_same(a, b) for a, b in zip(self._routed(), routed, strict=True))
        except Exception:
            # The router itself, or what it reads: whatever goes wrong, it is needed.
            return False
        finally:
            put(self.layer, name, child)

    def _output(self, given: Tensor | None, state: Tensor | None = None) -> Tensor:
        """What the layer gives where the experts give this."""
        made = self._call(self.state if state is None else state, Half.REST, given)
        return made[0] if isinstance(made, tuple) else made

    def _call(self, state: Tensor, half: Half, given: Tensor | None = None) -> Any:
        self.control.half, self.control.given = half, given
        try:
            return self.layer(state.clone(), **self.call)
        finally:
            self.control.half, self.control.given = Half.WHOLE, None


@contextmanager
def _watched(
    layer: nn.Module, names: list[str], note: Callable[[str, Any, Any, Any], object]
) -> Iterator[None]:
    """`note` is told of every call of these modules: name, arguments, output."""

    def hook(name: str) -> Any:
        def told(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            note(name, args, kwargs, output)

        return told

    handles = [
        layer.get_submodule(name).register_forward_hook(hook(name), with_kwargs=True)
        for name in names
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _close(one: Tensor, other: Tensor) -> bool:
    scale = float(other.abs().max()) + 1e-12
    return one.shape == other.shape and float((one - other).abs().max()) <= _CLOSE * scale


def _same(one: Tensor | None, other: Tensor) -> bool:
    return (
        one is not None
        and one.numel() == other.numel()
        and torch.equal(one.reshape(-1), other.reshape(-1))
    )


def _rounded(factor: float) -> float:
    """Six digits: configurations have no more, and float32 knows no more."""
    return float(f"{factor:.6g}")


def _in_proportion(scores: Tensor, index: Tensor, gates: Tensor) -> bool:
    if not bool((scores >= 0).all()) or int(index.max()) >= scores.shape[1]:
        return False
    ratio = gates.float() / scores.gather(1, index).clamp(min=1e-12)
    if index.shape[1] == 1:
        return bool((ratio / ratio.mean() - 1).abs().max() < 1e-3)
    return bool((ratio / ratio.mean(1, keepdim=True) - 1).abs().max() < 1e-3)
