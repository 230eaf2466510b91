"""Loss curves: what it flips of predictions that router mass is removed, or that copies in few bits
run in place of experts; and how the file of a profile keeps them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from trimmoe.core.contents import Kept, count, share
from trimmoe.core.specs import FloatArray, IntArray
from trimmoe.core.stand_ins import ASCENDING

COPIED_SHARE = 0.5
"""Of all slots, that run copies while it is measured what those lose: as many of little mass as of
much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossCurves:
    """Non-decreasing flip rate against router mass, one curve per layer and steadiness class.

    Bin g of layer l covers masses in (edges[l, b, g-1], edges[l, b, g]]; the last edge is 1. A
    mass is rounded up to its bin's edge, so a curve never flatters.
    """

    edges: FloatArray
    """Upper edge of each bin, shape [N, B, G], non-decreasing, last 1, the same in all classes."""
    mean: FloatArray
    """Isotonic fit of the measured flip rate, shape [N, B, G]."""
    upper: FloatArray
    """Upper confidence bound of the same, non-decreasing, shape [N, B, G], in [0, 1]."""
    samples: IntArray
    """Measurements behind each bin, shape [N, B, G]."""

    def inflated(self, factor: float) -> LossCurves:
        """The same curves with every bound `factor` times as large, at most 1."""
        assert factor >= 1.0
        return replace(self, upper=np.minimum(self.upper * factor, 1.0))

    def raised(self, by: FloatArray) -> LossCurves:
        """The same curves with every bound of a layer larger by so much, [N], at most 1."""
        return replace(self, upper=np.minimum(self.upper + by[:, None, None], 1.0))

    def averaged(self) -> LossCurves:
        """The same curves that bound nothing: what was measured on average instead."""
        return replace(self, upper=self.mean)

    def pooled(self, class_share: FloatArray) -> LossCurves:
        """The curves of tokens whose class is not looked at, B = 1; `class_share` [N, B]."""
        assert (self.edges == self.edges[:, :1]).all(), "classes share their bins"
        weight = class_share[:, :, None]
        return LossCurves(
            edges=self.edges[:, :1],
            mean=(weight * self.mean).sum(1, keepdims=True),
            upper=np.minimum((weight * self.upper).sum(1, keepdims=True), 1.0),
            samples=self.samples.sum(1, keepdims=True),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """What it costs that copies of experts in so many bits stand in for them."""

    bits: int
    curves: LossCurves
    """Of one slot that runs its expert's copy, with what it flips of later tokens, where half of
    all slots run theirs; mass = softmax mass of that slot."""

    def within(self, budget: float, class_share: FloatArray, top_k: int) -> LossCurves:
        """What a slot is charged under a policy that may flip `budget` of all tokens; `class_share`
        [N, B].

        Copies are off by a little noise, which adds up as noise does: n of them flip as the root of
        n. Half of a token's slots flip F together, so that (budget / F)^2 of those flip the budget,
        each of them F / budget times what it flips among all.
        """
        at_half = COPIED_SHARE * top_k * float((class_share * self.curves.upper.mean(2)).sum())
        return self.curves.inflated(max(1.0, at_half / budget)) if budget > 0 else self.curves


_CURVE_PARTS = tuple(item.name for item in fields(LossCurves))


def curve_arrays(name: str, curves: LossCurves) -> dict[str, np.ndarray]:
    """What a file keeps of curves, by name."""
    return {f"{name}.{part}": getattr(curves, part) for part in _CURVE_PARTS}


def rung_name(bits: int) -> str:
    """What a file calls the curves of copies in so many bits."""
    return f"rung{bits}"


def taken_curves(arrays: dict[str, np.ndarray], name: str) -> LossCurves:
    """The curves of a name, taken out of what a file keeps."""
    return LossCurves(**{part: arrays.pop(f"{name}.{part}") for part in _CURVE_PARTS})


def taken_rungs(arrays: dict[str, np.ndarray]) -> tuple[Rung, ...]:
    """The same of all copies that are there; raises `ValueError` for half a one."""
    found = []
    for bits in ASCENDING:
        name = rung_name(bits)
        there = {part for part in _CURVE_PARTS if f"{name}.{part}" in arrays}
        if not there:
            continue
        if len(there) < len(_CURVE_PARTS):
            raise ValueError(f"{name} is incomplete")
        found.append(Rung(bits=bits, curves=taken_curves(arrays, name)))
    return tuple(found)


def curve_fields(name: str, *, bins: str = "G", optional: bool = False) -> dict[str, Kept]:
    """What curves in a file have to be like."""
    axes = f"N B {bins}"
    kept = {f"{name}.{part}": share(axes) for part in ("edges", "mean", "upper")}
    kept[f"{name}.samples"] = count(axes)
    return {part: replace(each, optional=optional) for part, each in kept.items()}


def rung_fields(bits: int) -> dict[str, Kept]:
    """The same of copies in so many bits."""
    return curve_fields(rung_name(bits), bins="H", optional=True)
