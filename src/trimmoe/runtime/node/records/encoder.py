"""What reads prompts where the layers do not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoder:
    """What reads prompts for layers that do not."""

    start_token: int
    """What the layers begin with."""
    encode: Callable[[tuple[int, ...]], Awaitable[Tensor]]
    """What there is of a prompt for layers to attend to, [S, d]."""
