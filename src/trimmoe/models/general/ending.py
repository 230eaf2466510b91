"""What follows the last layer: norms, the head, and what becomes of its logits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trimmoe.core.errors import UserError
from trimmoe.models.general.attention import Positions, at
from trimmoe.models.general.passing import Passing
from trimmoe.models.general.running import Running

if TYPE_CHECKING:
    from trimmoe.core.precision import Precision
    from trimmoe.models.general.packed import Held

_CLOSE = 1e-3
_CAP = "final_logit_softcapping"
_SCALES = ("logits_scaling", "logit_scale", _CAP, "lm_head_multiplier")


class Ending:
    """Found once, by asking the whole model for the logits of a few random states."""

    def __init__(
        self, model: Any, decoder: Any, running: Running, through: Passing, positions: Positions
    ) -> None:
        """Raises UserError if logits are not what a head makes of normed states."""
        rows, width = positions.queries.shape[1], model.get_input_embeddings().weight.shape[1]
        generator = torch.Generator().manual_seed(0)
        like = next(decoder.parameters())
        states = torch.randn(1, rows, width, generator=generator).to(like)
        self._norm = _last_norm(decoder, running, through, positions, states)
        head = model.get_output_embeddings()
        self._weight: Tensor | None = head.weight
        self._held: Held | None = None
        self._ones = head.bias is not None
        if self._ones:
            # One more column, that meets a one.
            self._weight = torch.cat([head.weight, head.bias[:, None]], 1)
            head.weight = None
        self._cap = _cap(model.config)
        self._scale = 1.0
        try:
            wanted = self._asked(model, running, through, positions, states, head)
        except AttributeError:
            # A wrapper that cannot do without an image; nothing in its configuration says that it
            # does more than its decoder and head.
            if any(getattr(model.config.get_text_config(), name, None) for name in _SCALES):
                raise
            return
        self._scale = self._fitting(states[0], wanted)

    def multiplied(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """What the head multiplies: normed states [n, d] and its rows [V, d]; one more column if
        it adds a bias."""
        return self._read(states), self._rows()

    def _rows(self) -> Tensor:
        """The head's rows; of one that is packed what they stand for, worked out when asked."""
        if self._held is not None and self._weight is None:
            self._weight = torch.from_numpy(self._held.packed.restored)
        assert self._weight is not None
        return self._weight

    def logits(self, states: Tensor) -> Tensor:
        """Of states [n, d] that leave the last layer: [n, V]."""
        read = self._read(states)
        held = self._held
        return self.capped(F.linear(read, self._rows()) if held is None else held.times(read))

    def pack(self, precision: Precision) -> Held:
        """Hold the head in few bits."""
        from trimmoe.models.general.packed import Held

        self._held, self._weight = Held(self._rows(), precision), None
        return self._held

    def _read(self, states: Tensor) -> Tensor:
        """What the head multiplies, [n, d] or [n, d + 1]."""
        normed = self._norm(states)
        if self._scale != 1.0:
            normed = normed * self._scale
        if self._ones:
            ones = torch.full_like(normed[:, :1], self._scale)
            normed = torch.cat([normed, ones], 1)
        return normed

    def capped(self, logits: Tensor) -> Tensor:
        """Logits as the model gives them."""
        if self._cap is None:
            return logits
        return torch.tanh(logits / self._cap) * self._cap

    def _asked(
        self,
        model: Any,
        running: Running,
        through: Passing,
        positions: Positions,
        states: Tensor,
        head: Any,
    ) -> Tensor:
        """The model's own logits of these states, [n, V]."""
        if self._ones:
            head.weight = torch.nn.Parameter(self._rows()[:, :-1], requires_grad=False)
        running.notes.given = states
        try:
            with at(positions):
                made = model(
                    input_ids=torch.zeros_like(positions.queries),
                    position_ids=positions.queries,
                    use_cache=True,
                    **{running.argument: through},
                )
        finally:
            running.notes.given = None
        return made.logits[0]

    def _fitting(self, states: Tensor, wanted: Tensor) -> float:
        """The number that states are multiplied with before the head."""
        plain = F.linear(*self.multiplied(states)).double()
        asked = wanted.double()
        if self._cap is not None:
            asked = torch.atanh((asked / self._cap).clamp(-0.999999, 0.999999)) * self._cap
        scale = float((plain * asked).sum() / plain.square().sum())
        scale = float(f"{scale:.6g}") if wanted.dtype == torch.float32 else _simple(scale)
        apart = (plain * scale - asked).abs().max() / asked.abs().max()
        close = _CLOSE if wanted.dtype == torch.float32 else 0.05
        if not bool(apart < close):
            raise UserError(
                "This model does more with its last states than a norm and a head do; TrimMoE "
                "cannot serve it."
            )
        return scale


def _simple(scale: float) -> float:
    """The number meant where products are rounded to few digits: a ratio of small numbers."""
    from fractions import Fraction

    near = Fraction(scale).limit_denominator(64)
    return float(near) if abs(float(near) / scale - 1) < 0.01 else scale


def changes_logits(config: Any, *, capped: bool = False) -> bool:
    """Whether a text configuration names anything that is done to logits, but for their limits if
    they may be `capped`."""
    names = [name for name in _SCALES if not (capped and name == _CAP)]
    return any(getattr(config, name, None) not in (None, 1.0) for name in names)


def _cap(config: Any) -> float | None:
    return getattr(config.get_text_config(), _CAP, None)


def _last_norm(
    decoder: Any, running: Running, through: Passing, positions: Positions, states: Tensor
) -> Any:
    """The child that makes what leaves the decoder of what leaves the last layer."""
    names = {name: child for name, child in decoder.named_children() if name != "layers"}
    made: dict[str, Tensor] = {}
    handles = []
    for name, child in names.items():

        def note(_: Any, args: Any, output: Any, name: str = name) -> None:
            read = args[0] if args else None
            if isinstance(read, Tensor) and isinstance(output, Tensor) and _same(read, states):
                made[name] = output

        handles.append(child.register_forward_hook(note))
    try:
        ended = running.ended(states, through, positions)
    finally:
        for handle in handles:
            handle.remove()
    for name, output in made.items():
        if torch.equal(output, ended):
            return names[name]
    raise UserError(
        f"{type(decoder).__name__} does more behind its layers than norm their states; TrimMoE "
        f"cannot serve it."
    )


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)
