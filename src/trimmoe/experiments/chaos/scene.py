"""Where failures happen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trimmoe.experiments.chaos.lan import Lan
from trimmoe.experiments.chaos.stage import Stage
from trimmoe.experiments.chaos.streams import Asking, Seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """One run's servers and clients."""

    stage: Stage
    asking: Asking
    rng: np.random.Generator
    capacity: int
    """Answers at a time that servers have places for."""
    expected: Sequence[Seen]
    notes: list[str] = field(default_factory=list)
    """What is worth telling of the failure at hand, and no fault."""
    spared: int | None = None
    """A server that nothing is done to."""

    def some_server(self) -> int:
        others = [at for at in range(len(self.stage.names)) if at != self.spared]
        return int(self.rng.choice(others))

    @property
    def lan(self) -> Lan:
        assert self.stage.lan is not None
        return self.stage.lan
