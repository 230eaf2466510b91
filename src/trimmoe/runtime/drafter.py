"""What a draft model has read of sequences, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from trimmoe.core.specs import ModelSpec
from trimmoe.models.draft import DraftModel, own_flops

_LATELY = 0.1
"""How much each pass says of the next."""


class Drafter:
    """Of one server, or one process; used by the thread that computes."""

    def __init__(self, model: DraftModel) -> None:
        self.model = model
        self.token_s: float | None = None
        """What a pass of one token took lately; None before the first."""
        self._memory: dict[int, Any] = {}
        self._read: dict[int, int] = {}

    def read(self, sequence: int, start: int, tokens: Sequence[int]) -> Tensor | None:
        """Read tokens of a sequence from position `start` on, in place of what was read there;
        logits [V] after the last. None where there is no room, or they do not follow what was
        read."""
        scores = self.read_all(sequence, start, tokens)
        return None if scores is None else scores[-1]

    def read_all(self, sequence: int, start: int, tokens: Sequence[int]) -> Tensor | None:
        """The same with logits after each, [n, V]."""
        end = start + len(tokens)
        if start > self._read.get(sequence, 0) or end > self.model.context_length:
            return None
        if sequence not in self._memory:
            memory = self.model.begin()
            if memory is None:
                return None
            self._memory[sequence] = memory
        began_s = time.perf_counter()
        scores = self.model.read(self._memory[sequence], start, list(tokens))
        self._read[sequence] = end
        if len(tokens) == 1:
            self._took(time.perf_counter() - began_s)
        return scores

    def size(self, served: ModelSpec) -> float:
        """Its work over that of a guess of the served model's own."""
        return self.model.flops / own_flops(served)

    def close(self, sequence: int) -> None:
        """Forget a sequence if anything was read of it."""
        if sequence in self._memory:
            self.model.end(self._memory.pop(sequence))
        self._read.pop(sequence, None)

    def _took(self, took_s: float) -> None:
        before = took_s if self.token_s is None else self.token_s
        self.token_s = before + _LATELY * (took_s - before)
