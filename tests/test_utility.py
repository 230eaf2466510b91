"""(21) by hand."""

from __future__ import annotations

import numpy as np
import pytest

from trimmoe.cost.utility import utility


@pytest.mark.parametrize(
    ("loss_weight", "expected"),
    [(0.0, 0.5 + 1.5), (1.0, 0.25 + 0.75), (0.25, 0.75 * 2.0 + 0.25 * 1.0)],
)
def test_users_count_alike_each_against_their_own_reference_and_budget(
    loss_weight: float, expected: float
) -> None:
    """User 0 takes 1 of 2 s and loses 1 of 4 units, user 1 takes 9 of 6 s and loses 6 of 8."""
    delay_s, reference_s = np.array([1.0, 9.0]), np.array([2.0, 6.0])
    loss, budget = np.array([1.0, 6.0]), np.array([4.0, 8.0])
    found = utility(delay_s, reference_s, loss, budget, loss_weight=loss_weight)
    assert found == pytest.approx(expected)


def test_exact_execution_uses_nothing_of_no_budget_and_losing_without_one_is_infinitely_bad() -> (
    None
):
    one, none = np.array([1.0]), np.array([0.0])
    assert utility(one, one, none, none, loss_weight=0.5) == 0.5
    assert utility(one, one, one, none, loss_weight=0.5) == np.inf
