"""What `serve` plans for when it makes the plan itself."""

from __future__ import annotations

import pytest

from trimmoe.experiments.preparation import TRIMMED_SHARE, wanted
from trimmoe.placement.make import default
from trimmoe.runtime.launch.config import ServeConfig


@pytest.mark.parametrize("asked", [{"policy": "trimming"}, {"method": "trimming"}])
def test_what_trims_alone_is_planned_for_within_its_budget(asked: dict[str, str]) -> None:
    search, settings = wanted(ServeConfig.model_validate({**asked, "budget": 0.01}))
    assert (search.objective, search.budget) == ("trimmed", 0.01)
    assert settings.stand_in_share == TRIMMED_SHARE


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"policy": "auto", "budget": 0.02},
        {"policy": "speculative"},
        {"method": "ring"},
    ],
)
def test_what_guesses_is_planned_for_what_tokens_take_then(asked: dict[str, str | float]) -> None:
    search, settings = wanted(ServeConfig.model_validate(asked))
    assert search.objective == "guessed"
    assert settings == default()


@pytest.mark.parametrize(
    "asked", [{"policy": "exact"}, {"policy": "trimming", "budget": 0}, {"method": "edgeshard"}]
)
def test_all_else_is_planned_for_exact_execution(asked: dict[str, str | float]) -> None:
    search, settings = wanted(ServeConfig.model_validate(asked))
    assert search.objective == "exact"
    assert settings == default()
