"""Masks for rows of unequal positions, made where transformers lets others register theirs.

The kind of mask (causal, sliding, in chunks) is the model's own: transformers hands over a function
of positions, which is asked here for the positions that the rows of a batch really have.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    AttentionMaskInterface,
    causal_mask_function,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Positions:
    """Which positions meet in a call."""

    queries: Tensor
    """int64 [B, T]."""
    length: int
    """Cached keys, of the positions from 0 on."""
    beside: bool = False
    """Whether queries see the cached keys before them and themselves only; their own keys follow
    the cached ones."""


_current: ContextVar[Positions | None] = ContextVar("positions", default=None)


@contextmanager
def at(positions: Positions) -> Generator[None]:
    """Masks that are made meanwhile are for these positions."""
    token = _current.set(positions)
    try:
        yield
    finally:
        _current.reset(token)


def allowed(
    mask_function: Callable[..., Any], positions: Positions, *, skips: bool = True
) -> Tensor | None:
    """What may be attended to, bool [B, 1, T, L]; None if one query sees everything, and the model
    `skips` masks then."""
    queries = positions.queries
    rows = torch.arange(queries.shape[0], device=queries.device)[:, None, None, None]
    heads = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=queries.device)
    at_query = queries[:, None, :, None]
    keys = torch.arange(positions.length, device=queries.device)[None, None, None, :]
    seen = mask_function(rows, heads, at_query, keys)
    seen = torch.as_tensor(seen, device=queries.device)
    seen = seen.expand(queries.shape[0], 1, queries.shape[1], positions.length)
    if positions.beside:
        own = torch.eye(queries.shape[1], dtype=torch.bool, device=queries.device)
        own = own.expand(queries.shape[0], 1, -1, -1)
        return torch.cat((seen & (keys < at_query), own), -1)
    if skips and queries.shape[1] == 1 and bool(seen.all()):
        return None
    return seen


def _sdpa(seen: Tensor | None, _: torch.dtype) -> Tensor | None:
    return seen


def _eager(seen: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if seen is None:
        return None
    lowest = torch.finfo(dtype).min
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, lowest)


_FORMS = {"sdpa": _sdpa, "eager": _eager}
"""What a mask looks like for each kind of attention."""


def _mask_maker(form: Callable[..., Any], before: Callable[..., Any]) -> Callable[..., Any]:
    """Makes masks for the positions in force; where there are none, as `before`."""

    def make(
        *args: Any,
        mask_function: Callable[..., Any] = causal_mask_function,
        dtype: torch.dtype = torch.float32,
        allow_is_causal_skip: bool = True,
        **kwargs: Any,
    ) -> Tensor | None:
        positions = _current.get()
        if positions is None:
            kwargs |= {"mask_function": mask_function, "dtype": dtype}
            return before(*args, allow_is_causal_skip=allow_is_causal_skip, **kwargs)
        return form(allowed(mask_function, positions, skips=allow_is_causal_skip), dtype)

    return make


@cache
def register() -> None:
    """Have transformers make its masks here where positions are in force."""
    for name, form in _FORMS.items():
        before = ALL_MASK_ATTENTION_FUNCTIONS[name]
        AttentionMaskInterface.register(name, _mask_maker(form, before))


def use(model: Any) -> None:
    """Have a model, all parts of it, attend as it does where nothing else is asked for."""
    register()
    chosen = "sdpa" if getattr(type(model), "_supports_sdpa", False) else "eager"
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = chosen
