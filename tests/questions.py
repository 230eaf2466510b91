"""Prompts of unequal length for nodes, and what transformers itself answers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from nodes import request
from serving import EOS, Tiny
from trimmoe.runtime.service import GenerationRequest

LENGTHS = [1, 40, 3, 17, 9, 2, 64, 5, 33, 12, 8, 21, 4, 90, 6, 13]
NEW = [3, 9, 14, 1, 20, 6, 11, 8, 5, 17, 2, 12, 10, 7, 16, 4]


@dataclass(kw_only=True)
class Questions:
    """The first `count` of sixteen."""

    tiny: Tiny
    count: int = len(LENGTHS)

    @cached_property
    def prompts(self) -> list[list[int]]:
        rng = np.random.default_rng(7)
        return [rng.integers(0, 256, length).tolist() for length in LENGTHS[: self.count]]

    @property
    def new(self) -> list[int]:
        """How many tokens are asked for."""
        return NEW[: self.count]

    @cached_property
    def answers(self) -> list[list[int]]:
        """What transformers generates, up to the end of its text."""
        pairs = zip(self.prompts, self.new, strict=True)
        return [self.tiny.greedy(prompt, new) for prompt, new in pairs]

    def among(
        self, servers: int, *, new: int | None = None, **changes: Any
    ) -> list[tuple[int, GenerationRequest]]:
        """Requests with the servers that they are put to in turn; for `new` tokens each, or for as
        many as the answers have at most."""
        whole: dict[str, Any] = {"stop_ids": frozenset({EOS})} if new is None else {}
        wanted = self.new if new is None else [new] * self.count
        return [
            (i % servers, request(prompt, most, **(whole | changes)))
            for i, (prompt, most) in enumerate(zip(self.prompts, wanted, strict=True))
        ]
