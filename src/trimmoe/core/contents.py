"""What the arrays of an artifact must be like before anything is computed with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

_ROUNDING = 1e-3
"""That a share or a cosine kept in few bits may be beyond its bound."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """One array: its axes, and what its values may be."""

    axes: str
    """Sizes, by numbers or names that mean the same in all arrays of an artifact, perhaps one more
    or less: `N-1 E E`."""
    whole: bool = False
    """Whether they are whole numbers."""
    least: float = -np.inf
    most: float | str = np.inf
    """A number, or the name of a size that they are less than."""
    endless: bool = False
    """Whether they may be infinite."""
    unknown: bool = False
    """Whether they may be no numbers."""
    optional: bool = False


def share(axes: str, *, optional: bool = False) -> Kept:
    """Of one."""
    return Kept(axes=axes, least=-_ROUNDING, most=1.0 + _ROUNDING, optional=optional)


def amount(axes: str, *, endless: bool = False, unknown: bool = False) -> Kept:
    """Not negative."""
    return Kept(axes=axes, least=0.0, endless=endless, unknown=unknown)


def count(axes: str, most: float | str = np.inf) -> Kept:
    """Whole and not negative."""
    return Kept(axes=axes, whole=True, least=0.0, most=most)


def require_contents(
    arrays: Mapping[str, np.ndarray], fields: Mapping[str, Kept], **sizes: int
) -> dict[str, int]:
    """The sizes of an artifact whose arrays are as they must be, those known before among them;
    raises `ValueError` that names the first one that is not."""
    found = dict(sizes)
    if strange := sorted(set(arrays) - set(fields)):
        raise ValueError(f"{strange[0]} is unknown")
    for name, kept in fields.items():
        array = arrays.get(name)
        if array is None:
            if not kept.optional:
                raise ValueError(f"{name} is missing")
            continue
        if not _has_shape(array.shape, kept.axes.split(), found):
            raise ValueError(f"{name} has the shape {array.shape}")
        if array.dtype.kind not in ("iub" if kept.whole else "f"):
            raise ValueError(f"{name} holds {array.dtype}")
        if not _are_possible(array, kept, found):
            raise ValueError(f"{name} holds impossible values")
    return found


def _has_shape(shape: Sequence[int], axes: Sequence[str], sizes: dict[str, int]) -> bool:
    """Whether an array's shape is that; sizes not known before are taken from it."""
    if len(shape) != len(axes):
        return False
    for length, axis in zip(shape, axes, strict=True):
        if axis.isdigit():
            if length != int(axis):
                return False
            continue
        name, more = axis[0], int(axis[1:] or 0)
        if sizes.setdefault(name, length - more) + more != length or sizes[name] < 1:
            return False
    return True


def _are_possible(array: np.ndarray, kept: Kept, sizes: Mapping[str, int]) -> bool:
    if not array.size:
        return True
    if kept.unknown:
        array = array[~np.isnan(array)]
        if not array.size:
            return True
    least, most = array.min(), array.max()  # No number, if anything is none.
    if isinstance(kept.most, str):
        return bool(least >= kept.least and most < sizes[kept.most])
    finite = kept.endless or bool(np.isfinite(least) and np.isfinite(most))
    return finite and bool(least >= kept.least and most <= kept.most)
