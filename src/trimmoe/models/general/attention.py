"""Attention and masks for rows of unequal positions, as transformers lets others register them.

The kind of mask (causal, sliding, in chunks) is the model's own: transformers hands over a function
of positions, which is asked here for the positions that the rows of a batch really have.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

SDPA, EAGER = "trimmoe_sdpa", "trimmoe_eager"
"""What `config._attn_implementation` says for models of either kind."""


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


_current: ContextVar[Positions] = ContextVar("positions")


@contextmanager
def at(positions: Positions) -> Generator[None]:
    """Masks that are made meanwhile are for these positions."""
    token = _current.set(positions)
    try:
        yield
    finally:
        _current.reset(token)


def allowed(mask_function: Callable[..., Any], positions: Positions) -> Tensor | None:
    """What may be attended to, bool [B, 1, T, L]; None if one query sees everything."""
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
    if queries.shape[1] == 1 and bool(seen.all()):
        return None
    return seen


def _sdpa_mask(*_: Any, mask_function: Callable[..., Any], **__: Any) -> Tensor | None:
    return allowed(mask_function, _current.get())


def _eager_mask(
    *_: Any, mask_function: Callable[..., Any], dtype: torch.dtype = torch.float32, **__: Any
) -> Tensor | None:
    seen = allowed(mask_function, _current.get())
    if seen is None:
        return None
    lowest = torch.finfo(dtype).min
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, lowest)


def _eager(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The attention that the module's own file writes out."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


def register() -> None:
    """Make both known to transformers; once or many times."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(SDPA, sdpa_attention_forward)
    AttentionInterface.register(EAGER, _eager)
    AttentionMaskInterface.register(SDPA, _sdpa_mask)
    AttentionMaskInterface.register(EAGER, _eager_mask)


def use(model: Any) -> None:
    """Have a model, all parts of it, attend through what is registered here."""
    register()
    chosen = SDPA if getattr(type(model), "_supports_sdpa", False) else EAGER
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = chosen
