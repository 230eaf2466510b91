"""A recording of decode steps that any device has."""

from __future__ import annotations

from collections.abc import Callable

from trimmoe.models.replay import Passed


class Anew:
    """Records by running the step once more, into what it gave at first."""

    def __init__(self) -> None:
        self.made = 0
        self.run = 0

    def __call__(self, step: Callable[[], Passed]) -> tuple[Passed, Callable[[], None]]:
        passed = step()
        self.made += 1

        def again() -> None:
            self.run += 1
            now = step()
            passed.hidden.copy_(now.hidden)
            passed.experts.copy_(now.experts)
            if passed.kept is not None and now.kept is not None:
                passed.kept.copy_(now.kept)

        return passed, again
