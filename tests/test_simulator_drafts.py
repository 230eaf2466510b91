"""Exits as drafts: the next token sets out on a prediction that full depth has yet to confirm. A
right one saves the stream the layers left; a wrong one saves nothing, and what set out on it has
taken up servers and links for nothing. Times are computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulated import World, drained, slowed, world
from test_simulator_trails import LAYERS, answered, finished_s, stages
from trimmoe.core.events import Receipt
from trimmoe.core.exit_states import ExitState
from trimmoe.core.ledger import Kind, Ledger
from trimmoe.simulator.arrivals import Requests
from trimmoe.simulator.journey import Itinerary
from trimmoe.simulator.measure import Sample, figures
from trimmoe.simulator.settings import Load
from trimmoe.simulator.tables import RequestTable, RowPool
from trimmoe.simulator.world import DENSE, NONE

DRAFTS = 1e-9
"""Confidence of drafts where tests say which of them are right."""
DOUBTFUL = 1e-6
"""A head's confidence that is enough for a draft, which is almost never right."""
OWN_SERVERS = [1, 2, 3]
"""A route on which nothing meets anything but on its way; users are at server 0."""


@dataclass(frozen=True)
class Token:
    """After how many layers there is a prediction, and whether it is that of full depth."""

    depth: int = LAYERS
    right: bool = True


FULL = Token()


def right(depth: int) -> Token:
    return Token(depth)


def wrong(depth: int) -> Token:
    return Token(depth, right=False)


def drafting(one: World, confidence: float | None = DRAFTS) -> World:
    """The same world where exits are drafts; without a confidence they are final."""
    policy = one.engine.settings.but(exit_state=ExitState.WHOLE, draft_confidence=confidence)
    return replace(one, engine=replace(one.engine, settings=policy))


def played(one: World, tokens: Sequence[Token]) -> Sample:
    """One request of these tokens."""
    confidence = np.zeros_like(one.trace.confidence)
    for number, token in enumerate(tokens):
        if token.depth < LAYERS:
            confidence[number, token.depth - 1 :] = 1.0 if token.right else DOUBTFUL
    # At seed 0 the first token's draw is exactly 0, so that its draft is right whatever its head.
    sample = answered(one, confidence, [len(tokens)], seed=1)
    drafts = [token for token in tokens[:-1] if token.depth < LAYERS]
    drafts *= one.engine.settings.drafts
    assert sample.drafts == len(drafts)
    assert sample.wrong_drafts == sum(not token.right for token in drafts)
    return sample


def test_the_token_after_a_right_draft_follows_one_layer_behind() -> None:
    """b sets out when a is through the first layer; every layer has a server of its own:

        0    1    2    3    4
    0:  | a  | b  |
    1:       | a  | b  |
    2:            | a  | b  |
    """
    sample = played(drafting(stages([0, 1, 2])), [right(1), FULL])
    assert finished_s(sample, 0) == [1.0, 4.0]
    assert sample.withdrawn_layers == 0
    assert sample.after.served[:3, DENSE, 1].tolist() == [2, 2, 2]


def test_nothing_sets_out_on_a_draft_before_the_one_ahead_of_it_is_confirmed() -> None:
    """c might at 2, when b is through the first layer, but a is a draft until it is through all:

        0    1    2    3    4    5    6
    0:  | a  | b  |    | c  |
    1:       | a  | b  |    | c  |
    2:            | a  | b  |    | c  |
    """
    sample = played(drafting(stages([0, 1, 2])), [right(1), right(1), FULL])
    assert finished_s(sample, 0) == [1.0, 2.0, 6.0]
    # Shown are a when it is through all layers, at 3, and b at 4.
    assert sample.token_s.tolist() == [3.0, 1.0, 2.0]


def test_of_two_right_drafts_the_first_is_shown_first() -> None:
    """Whoever comes to the last server finds it busy for ten seconds with the one before."""
    one = stages([0, 1, 2])
    dense_s = one.engine.cost.dense_s.copy()
    dense_s[:, -1] = 10.0
    one = replace(one, engine=replace(one.engine, cost=replace(one.engine.cost, dense_s=dense_s)))
    sample = played(drafting(one), [right(1), right(2), FULL])
    assert finished_s(sample, 0) == [1.0, 12.0, 32.0]
    # Through at 12, 22 and 32.
    assert sample.token_s.tolist() == [12.0, 10.0, 10.0]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_first_token_that_is_a_draft_comes_when_it_is_confirmed(depth: int) -> None:
    sample = played(drafting(stages([0, 1, 2], 0.125)), [right(depth), FULL])
    assert sample.first_token_s.tolist() == [3.375]


def test_on_one_server_two_tokens_go_on_together() -> None:
    """Lower layers come first, and a batch of two takes as long as one:

    0    1    2    3    4
    | a  | b  | ab | ab |
    """
    sample = played(drafting(stages([0, 0, 0])), [right(1), FULL])
    assert finished_s(sample, 0) == [1.0, 4.0]


def test_on_one_server_a_token_waits_for_what_set_out_on_its_own_wrong_draft() -> None:
    """Until w has caught up; then they go on together:

    0    1    2    3    4    5    6    7
    | a  | w  | aw | aw | b  | b  | b  |
    """
    sample = played(drafting(stages([0, 0, 0])), [wrong(1), FULL])
    assert finished_s(sample, 0) == [4.0, 7.0]
    assert sample.after.served[0, DENSE].tolist() == [7, 9]
    assert sample.withdrawn_layers == 3


@pytest.mark.parametrize(
    ("last_s", "depth", "passed", "finished"),
    [(2.0, 1, 3, [4.375, 8.75]), (2.0, 2, 2, [4.375, 8.75]), (0.5, 2, 1, [2.875, 6.25])],
)
def test_what_set_out_on_a_wrong_draft_ends_where_word_has_come_that_it_was_wrong(
    last_s: float, depth: int, passed: int, finished: list[float]
) -> None:
    """Every layer has a server of its own, an eighth of a second from the others; the last takes
    longer than the others, or less. A draft after l layers is made at the server of the next one,
    at l 9/8; what sets out on it, w, does so an eighth later.

    The last layer takes two seconds: after one layer, w is there at 3.5, waits for the token before
    it and enters with it through, at 4.25. After two, it comes at 4.625, and word at 4.5. The next
    token meets it nowhere.

    The last layer takes half a second: the user has full depth's word at 2.875, but the next token
    waits for the server, where w is in the first layer until 3.375. It is at the second one's at
    3.5, and word at 3.
    """
    one = stages([0, 1, 2], 0.125)
    dense_s = one.engine.cost.dense_s.copy()
    dense_s[:, -1] = last_s
    cost = replace(one.engine.cost, dense_s=dense_s)
    one = replace(one, engine=replace(one.engine, cost=cost))
    sample = played(drafting(one), [wrong(depth), FULL])
    assert finished_s(sample, 0) == finished
    assert sample.withdrawn_layers == passed
    units = [2 + (passed > layer) for layer in range(LAYERS)]
    assert sample.after.served[:3, DENSE, 1].tolist() == units
    assert sample.after.server_busy_s[:3].tolist() == [units[0], units[1], units[2] * last_s]


def test_a_wrong_draft_that_comes_after_full_depth_has_spoken_leads_to_nothing() -> None:
    """It exits at a server from which it is far to its user, and goes on to one that is near."""
    one = stages([0, 1, 2], 0.125)
    delay_s = one.deployment.plan.cluster.delay_s.copy()
    delay_s[1, 0] = 3.0
    cluster = replace(one.deployment.plan.cluster, delay_s=delay_s)
    deployment = replace(one.deployment, plan=replace(one.deployment.plan, cluster=cluster))
    sample = played(drafting(replace(one, deployment=deployment)), [wrong(1), FULL])
    assert finished_s(sample, 0) == [3.375, 6.75]
    assert sample.wrong_drafts == 1
    assert sample.withdrawn_layers == 0
    assert sample.after.served[:3, DENSE, 1].tolist() == [2, 2, 2]


@pytest.mark.parametrize("token", [right(1), wrong(1), right(2), FULL])
def test_a_request_is_answered_when_full_depth_has_confirmed_its_last_token(token: Token) -> None:
    sample = played(drafting(stages([0, 1, 2], 0.125)), [right(2), token])
    assert finished_s(sample, 0)[-1] == 2.375 + 3.375
    assert sample.ledger.kinds[:, Kind.EXITED].tolist() == [0, 0, 1]
    assert sample.withdrawn_layers == 0
    assert sample.after.served[:3, DENSE, 1].tolist() == [2, 2, 2]


TOKENS = st.builds(Token, st.integers(1, LAYERS), st.booleans())


@settings(max_examples=25)
@given(st.lists(TOKENS, min_size=1, max_size=8), st.sampled_from([0.0, 0.125, 1.5]))
def test_a_lone_stream_takes_what_its_ledgers_say(tokens: list[Token], way_s: float) -> None:
    """Where no two layers share a server. All follow one another in the same time from layer to
    layer, so nobody ever meets who set out before: not the trail of a right draft nor what set out
    on a wrong one. A right draft after l layers takes l seconds and its ways there and back; a
    wrong one and the last token what they take at full depth."""
    one = stages(OWN_SERVERS, way_s)
    sample = played(drafting(one), tokens)
    log = sample.all_units
    depths = [token.depth if token.right else LAYERS for token in tokens[:-1]] + [LAYERS]
    # From the user to the first layer, from each to the next, and back. Ledgers also have the
    # microseconds of the experts, which the policy does not know to be free here.
    expected_s = [depth + way_s * (depth + (depth < LAYERS) + 1) for depth in depths]
    np.testing.assert_allclose(log.finished_s - log.began_s, expected_s)
    # Whatever is shown when, an answer takes from its beginning to its end.
    took_s = log.finished_s[-1] - log.began_s[0]
    assert sample.token_s.sum() == pytest.approx(took_s)
    assert (sample.token_s >= 0).all()
    # A draft waits for the one ahead of it, so two take one full depth at least.
    full_s = LAYERS + way_s * (LAYERS + 1)
    exited = [depth < LAYERS for depth in depths]
    charged_s = np.where(exited, np.maximum(expected_s, full_s / 2), expected_s)
    np.testing.assert_allclose(log.expected_s, charged_s, rtol=1e-4)
    assert took_s <= charged_s.sum() + 1e-6
    if (charged_s == expected_s).all():
        assert took_s == pytest.approx(charged_s.sum())


@settings(max_examples=25)
@given(st.lists(TOKENS, min_size=1, max_size=8), st.sampled_from([0.0, 0.125]))
def test_what_is_withdrawn_takes_up_servers_and_links(tokens: list[Token], way_s: float) -> None:
    """Besides what it does, the same is done and sent as without drafts: every token passes all
    layers."""
    one = stages(OWN_SERVERS, way_s)
    plain = played(one_without_exits(one), [FULL] * len(tokens))
    sample = played(drafting(one), tokens)
    assert sample.ledger.tokens == len(tokens)
    more_s = sample.after.server_busy_s.sum() - plain.after.server_busy_s.sum()
    assert more_s == pytest.approx(sample.withdrawn_layers)
    np.testing.assert_array_equal(sample.after.sent[0], sample.all_ledger.messages)
    # A vector to the next server after each layer but the last.
    more = sample.all_ledger.hops - plain.all_ledger.hops
    assert 0 <= more <= sample.withdrawn_layers
    assert (more > 0) == (sample.withdrawn_layers > 0)


def one_without_exits(one: World) -> World:
    policy = one.engine.settings
    levers = replace(policy.levers, exit=False)
    return replace(one, engine=replace(one.engine, settings=replace(policy, levers=levers)))


@settings(max_examples=10)
@given(
    st.integers(0, 2**31), st.integers(1, 5), st.sampled_from([1.0, 30.0]),
    st.sampled_from([0.05, 10.0]),
)  # fmt: skip
def test_what_is_sent_and_done_is_what_the_books_say(
    seed: int, servers: int, factor: float, control_s: float
) -> None:
    """Under load, with prompts, with decisions that are forgotten and made anew, to the last
    vector. No trail ends early, for a request is not over before its last token is through."""
    one = world(seed=seed, servers=servers, layers=5, draft_confidence=0.3)
    one = replace(one, engine=slowed(one.engine, factor))
    sample = drained(one, control_s=control_s)
    np.testing.assert_array_equal(sample.after.sent, sample.after.received)
    np.testing.assert_array_equal(sample.after.sent[0], sample.all_ledger.messages)
    passed = sample.after.served[:, DENSE, 1].sum()
    assert passed == 5 * sample.all_units.decoded.sum() + sample.withdrawn_layers
    assert sample.all_ledger.kinds.sum(axis=1).tolist() == [sample.all_ledger.tokens] * 5
    exited = sample.ledger.kinds[-1, Kind.EXITED]
    assert exited == sample.drafts - sample.wrong_drafts
    assert 0 <= sample.withdrawn_layers <= 5 * sample.wrong_drafts


def test_what_is_withdrawn_counts_as_no_token() -> None:
    one = world(layers=5, draft_confidence=0.3)
    sample = drained(one)
    log, shown = sample.all_units, figures(sample, 0.3)
    assert 0.2 < shown["wrong_draft_share"] < 0.8
    assert shown["withdrawn_layers_per_token"] > 0
    decoded = int(log.decoded.sum())
    assert sample.token_s.size == sample.ledger.tokens == decoded
    assert shown["drafts_per_token"] == sample.drafts / decoded
    # In flight are tokens and chunks alone.
    assert sample.after.area == pytest.approx((log.finished_s - log.began_s).sum())


def test_drafts_are_wrong_as_often_as_their_heads_say() -> None:
    one = drafting(world(layers=5), 0.3)
    expected = []
    for chance in (0.4, 0.9):
        confidence = np.full_like(one.trace.confidence, chance)
        doubtful = replace(one, trace=replace(one.trace, confidence=confidence))
        load = Load(rate_per_s=40.0, requests=200, output_tokens=8)
        sample = doubtful.run(load, duration_s=60.0)
        assert sample.drafts > 1000
        share = sample.wrong_drafts / sample.drafts
        assert share == pytest.approx(1 - chance, abs=0.05)
        expected.append(sample.withdrawn_layers / sample.drafts)
    assert expected[0] > 3 * expected[1]


def test_exits_that_are_final_are_no_drafts() -> None:
    """The last one, too, answers its request; and the one after two of them waits for neither,
    where a draft waits for the end of the one ahead, of which word comes at 3.375."""
    one = stages([0, 1, 2], 0.125)
    tokens = [right(1)] * 3
    sample = played(drafting(one, None), tokens)
    assert finished_s(sample, 0) == [1.25, 2.5, 3.75]
    assert sample.ledger.kinds[-1, Kind.EXITED] == 3
    assert sample.withdrawn_layers == 0
    assert finished_s(played(drafting(one), tokens), 0) == [1.25, 2.5, 6.75]


def test_a_decision_that_is_forgotten_leaves_no_row_behind() -> None:
    """Nor that of what would have set out on its draft."""
    journey = Itinerary.blank(2, LAYERS, 1)
    journey.layers[:], journey.wrong_at[:] = LAYERS, [1, NONE]
    journey.ledgers = [Ledger.empty(LAYERS, 1, 1)] * 2
    receipt = Receipt(sequence=0, budget=0.0, loss=0.0, delay_s=0.0, exit_confidence=None)
    journey.receipts = [receipt] * 2
    pool, nothing = RowPool.of(LAYERS, 1, 1), np.zeros(2, dtype=np.int64)
    requests = Requests(
        arrival_s=np.zeros(2), access=nothing, sequence=nothing, offset=nothing, prompt=nothing,
        output=nothing + 1,
    )  # fmt: skip
    table, capacity = RequestTable.of(requests, 1), []
    for _ in range(1100):
        rows = pool.add(journey, decoded=True)
        assert pool.drafts(rows).size == 1
        for request, row in enumerate(rows.tolist()):
            table.append(pool.rows, request, row)
        table.decided[:] = 1
        table.drop_ahead(pool)
        capacity.append(pool.rows.layers.size)
    assert capacity[-1] == capacity[0]
