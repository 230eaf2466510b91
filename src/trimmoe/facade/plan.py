"""A plan with the model and the profile that it belongs to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from trimmoe.core.plan import Plan as Placed
from trimmoe.core.profile import Profile
from trimmoe.core.specs import ModelSpec
from trimmoe.core.trace import Trace
from trimmoe.engine.step import Engine
from trimmoe.experiments.methods import chosen, method_engine, require_fitting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from trimmoe.facade.model import Model

File = str | PathLike[str]
_Key = tuple[str, float | None, float]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """Who holds which experts, and on which route each server's users run; from `Model.plan`.

    Examples:
        >>> import trimmoe
        >>> plan = trimmoe.load("embedded").plan("local4")
        >>> plan.servers
        ('desk', 'shelf', 'attic', 'cellar')
        >>> plan.save("plan.trim")
        >>> trimmoe.load("embedded").load_plan("plan.trim").placed.hash == plan.placed.hash
        True
    """

    model: Model
    profile: Profile = field(repr=False)
    """What calibration measured of the model."""
    placed: Placed = field(repr=False)
    """Hosts [M, N, E] and routes [M, N] on the cluster: M servers, N MoE layers, E experts."""
    _engines: dict[_Key, Engine] = field(default_factory=dict, repr=False)
    """Those made so far; their tables take seconds."""

    @property
    def servers(self) -> tuple[str, ...]:
        """Names of the servers; users talk to the first unless another is named."""
        return self.placed.cluster.server_names

    @property
    def expected_s(self) -> dict[str, float]:
        """Seconds that a token takes, executed exactly and without load, by its user's server."""
        from trimmoe.experiments.explain import plan_figures

        route_s = plan_figures(self.placed, self.profile, self.model.spec).route_s
        return dict(zip(self.servers, route_s.tolist(), strict=True))

    def save(self, path: File) -> None:
        """Write the plan for `trimmoe serve --plan` and its like; `plan.profile.save` writes what
        goes with it. Raises `UserError`."""
        self.placed.save(Path(path))

    def plot(self, path: File | None = None) -> Figure:
        """The heat map of experts by server and layer, with a dot where tokens run; also written
        to `path` as a PNG if one is given. Raises `UserError`."""
        from trimmoe.experiments.explain import plan_picture, plot_plan

        if path is not None:
            plot_plan(self.placed, Path(path))
        return plan_picture(self.placed)

    def record(self, text: Sequence[File] = (), *, tokens: int = 1024) -> Trace:
        """What so many tokens of a text do at every layer, and what each server would guess of
        them by itself: what `simulate` replays. Made once and kept. Without files in `text` it is
        prose that every Python carries and that no profile was made from. Raises `UserError`."""
        from trimmoe.experiments.recording import recorded

        model = self.model
        return recorded(
            model.view, model.tokenizer, self.profile, self.placed, tuple(map(Path, text)), tokens
        )

    def engine(
        self, method: str, *, budget: float | None, confidence: float, model: ModelSpec
    ) -> Engine:
        """What decides under a method, as `Model.generate` runs it. Raises `UserError` for an
        unknown method, and for another model than the plan's."""
        key = method, budget, confidence
        named, policy = chosen(method, budget=budget, confidence=confidence)
        require_fitting(self.profile, self.placed, model)
        if key not in self._engines:
            self._engines[key] = method_engine(named, self.placed, self.profile, model, policy)
        return self._engines[key]
