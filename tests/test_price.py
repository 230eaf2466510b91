"""The price of quality to begin with, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from byhand import PLAIN, REFERENCE_S, hosting, one_bin, world
from trimmoe.cost.actions import Levers
from trimmoe.cost.model import Accounting
from trimmoe.policy.build import deploy, starting_weights
from trimmoe.policy.price import WEIGHTS, meeting_weights


def odds(weight: float) -> float:
    return float(np.log(weight / (1.0 - weight)))


@pytest.mark.parametrize(
    ("way_ms", "exits", "target", "log_odds"),
    [
        # 1 ms away a layer costs 3 (1 - w), a skip of 4 units 4/8 w: it is skipped up to w = 6/7,
        # of log odds ln 6 = 1.79, and 1.9 is the first beyond. Up to there both layers are
        # skipped, 8 of 8 units, which is above the target of 7.2.
        (1, False, 0.9, 1.9),
        # A target of all 8 units is met at once.
        (1, False, 1.0, -2.9),
        # Half of the tokens exit before layer 1: 4 + 1/2 x 4 = 6 units, within 7.2 but above 5.6.
        (1, True, 0.9, -2.9),
        (1, True, 0.7, 1.9),
        # 10 ms away, 21 (1 - w), it is skipped up to w = 42/43, of 3.74: none will do.
        (10, False, 0.9, 2.9),
    ],
)
def test_it_is_the_least_at_which_typical_tokens_stay_within_the_target(
    way_ms: float, exits: bool, target: float, log_odds: float
) -> None:
    made = world(
        hosting([[], []], [[0, 1], [0, 1]]),
        [[0, way_ms], [way_ms, 0]],
        skip=one_bin([4, 4]),
        active=np.array([1.0, 0.5]),
    )
    look = made.policy(replace(PLAIN, horizon=None)).lookahead
    routes = np.array([[0, 0]])
    (weight,) = meeting_weights(
        look.space, look.profile, look.weights, routes, exits=exits, target=target
    )
    assert weight in WEIGHTS
    assert odds(weight) == pytest.approx(log_odds)


def test_steadier_tokens_count_by_their_share() -> None:
    """A quarter of the tokens is of class 0, whose skip costs 8 units, the others' 4: at the least
    weight, where both are skipped, 1/4 x 8 + 3/4 x 4 = 5 of 8. A target of 5/8 is met there, one a
    little less is not. Class 0 stops at 3 (1 - w) = w, of log odds ln 3 = 1.10; from 1.1 on 3 are
    lost."""
    made = world(hosting([[]], [[0, 1]]), [[0, 1], [1, 0]], skip=one_bin([4]))
    upper = np.array([[[8.0], [4.0]]]) / 128
    skip = replace(made.profile.skip, upper=upper, edges=np.ones_like(upper))
    profile = replace(
        made.profile,
        skip=skip,
        drop=skip,
        class_share=np.array([[0.25, 0.75]]),
        substitution_loss=np.zeros((1, 2, 1, 2, 2)),
    )
    look = replace(made, profile=profile).policy(replace(PLAIN, horizon=None)).lookahead
    found = [
        meeting_weights(
            look.space, profile, look.weights, np.array([[0]]), exits=False, target=target
        )[0]
        for target in (0.625, 0.62)
    ]
    assert [odds(weight) for weight in found] == pytest.approx([-2.9, 1.1])


def test_prices_are_taken_by_route_where_tokens_stay_on_one() -> None:
    """The first row of the first test, and a second user whose layers are all at home, where
    none is skipped. Who migrates has no route."""
    made = world(hosting([[], []], [[0, 1], [0, 1]]), [[0, 1], [1, 0]], skip=one_bin([4, 4]))
    levers = Levers(exit=False, local=False)
    settings = PLAIN.but(horizon=None, price_start=True, levers=levers)
    found = {}
    for accounting in Accounting:
        deployment = deploy(made.plan, made.profile, made.model, accounting)
        deployment = replace(deployment, reference_s=REFERENCE_S)
        space = made.policy(replace(settings, accounting=accounting)).lookahead.space
        weights = starting_weights(space, deployment, made.profile, settings)
        found[accounting] = [round(odds(weight), 6) for weight in weights]
    by_route = [1.9, -2.9]
    assert found == {
        Accounting.PINNED: by_route, Accounting.HOME: by_route, Accounting.MIGRATE: []
    }  # fmt: skip


@pytest.mark.parametrize(("gated", "log_odds"), [(False, 0.7), (True, -2.9)])
def test_nobody_begins_as_if_layers_at_home_were_skipped_where_only_transmission_allows_it(
    gated: bool, log_odds: float
) -> None:
    """Both layers are at home. A skip of 4 units saves 1 ms there and pays up to log odds ln 2 =
    0.69, so 8 of 8 units are lost below; gated by (35) there is none, and any price will do."""
    made = world(hosting([[0, 1], [0, 1]]), [[0]], skip=one_bin([4, 4]))
    levers = Levers(exit=False, skip_needs_transmission=gated)
    look = made.policy(replace(PLAIN, horizon=None, levers=levers)).lookahead
    (weight,) = meeting_weights(
        look.space, look.profile, look.weights, np.array([[0, 0]]), exits=False, target=0.9
    )
    assert odds(weight) == pytest.approx(log_odds)
