"""When tokens are expected to exit: never only where none may."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from factories import random_model_spec, random_profile
from trimmoe.core.profile import Profile
from trimmoe.cost.exits import calibrated
from trimmoe.policy.build import exit_forecast
from trimmoe.policy.presets import PRESETS
from trimmoe.policy.settings import PolicySettings

LEAVING = 0.25
"""Of tokens that reach a layer but the last."""


def profile(*, error: float) -> Profile:
    """Three layers; at any confidence half of all tokens exit, and so many of those err."""
    rng = np.random.default_rng(0)
    made = random_profile(rng, random_model_spec(rng, layers=3))
    hazard = np.full((4, 3), LEAVING)
    hazard[:, -1] = 1.0
    return replace(
        made,
        exit_grid=np.array([0.5, 0.9]),
        exit_error_upper=np.full(2, error),
        exit_rate=np.full(2, 0.5),
        exit_hazard=hazard,
    )


def goes_on(settings: PolicySettings, error: float) -> list[float]:
    """Probabilities of going on after each layer, the same whatever is predicted."""
    (row,) = exit_forecast(profile(error=error), settings).goes_on.tolist()
    return row


@pytest.mark.parametrize("name", ["trimmoe", "lossless"])
def test_drafts_are_foreseen_whatever_exits_would_flip(name: str) -> None:
    """Nobody is shown a draft, so that no risk keeps it from setting out."""
    drafts = PRESETS[name]().but(exit_risk=0.01)
    assert goes_on(drafts, error=0.4) == [0.75, 0.75, 0.0]


def test_drafts_are_foreseen_as_often_as_they_set_out_at_their_own_confidence() -> None:
    """Which is lower than that of exits that may flip something."""
    hazard = np.full((4, 3), 0.6)
    hazard[:, -1] = 1.0
    made = replace(profile(error=0.0), draft_hazard=hazard)
    for name, going_on in (("trimmoe", 0.4), ("lossless", 0.4), ("final-exits", 0.75)):
        (row,) = exit_forecast(made, PRESETS[name]()).goes_on.tolist()
        np.testing.assert_allclose(row, [going_on, going_on, 0.0])


def test_final_exits_are_foreseen_only_where_their_risk_is_tolerated() -> None:
    """Half of all tokens exit and 40 % of those err: 0.2 of all."""
    final = PRESETS["final-exits"]().but(exit_risk=0.19)
    assert goes_on(final, error=0.4) == [1.0, 1.0, 0.0]
    assert goes_on(final.but(exit_risk=0.21), error=0.4) == [0.75, 0.75, 0.0]


def test_without_the_lever_nothing_exits() -> None:
    assert goes_on(PRESETS["substitute-only"](), error=0.0) == [1.0, 1.0, 0.0]


def test_measured_hazards_are_pooled_by_the_depth_that_is_expected() -> None:
    """Whoever is predicted to exit after a layer does; each two of eight depths share a row."""
    hazard = np.vstack([np.zeros(8), np.eye(8)])
    forecast = calibrated(hazard, groups=4)
    assert forecast.row_of.tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3]
    assert forecast.goes_on[0].tolist() == [0.5, 0.5, *[1.0] * 5, 0.0]
    assert forecast.goes_on[3].tolist() == [*[1.0] * 6, 0.5, 0.0]
    assert calibrated(hazard, groups=2).row_of.tolist() == [0, *[0] * 4, *[1] * 4]
