"""Guesses of users' own servers: the next token sets out on what its user's server guesses, behind
the one before. A right guess saves all but its own time; a wrong one saves nothing, and what set
out on it has taken up servers and links for nothing. Times are computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulated import LENGTH, SEQUENCES, World, drained, slowed, world
from test_simulator_trails import LAYERS, answered, finished_s, stages
from trimmoe.core.errors import UserError
from trimmoe.core.trace import Trace, load_trace
from trimmoe.cost.guessing import guess_times_s, window
from trimmoe.cost.model import Accounting
from trimmoe.engine.guesses import DraftsAlong, GuessRules
from trimmoe.engine.lead import Lead
from trimmoe.experiments.method_engines import make_engine
from trimmoe.policy.build import make_policy
from trimmoe.policy.presets import speculative
from trimmoe.simulator.ahead import Ahead
from trimmoe.simulator.arrivals import Requests
from trimmoe.simulator.feed import TraceFeed
from trimmoe.simulator.generate import Parameters, generate_trace
from trimmoe.simulator.measure import Sample, figures
from trimmoe.simulator.replay import replay
from trimmoe.simulator.settings import Load, Prefill
from trimmoe.simulator.tables import RequestTable
from trimmoe.simulator.world import DENSE, HOME, NONE, make_rows, make_world
from trimmoe.simulator.world import UNSURE as UNSURE_GUESS

OWN_SERVERS = [1, 2, 3]
"""A route on which nothing meets anything but on its way; users are at server 0."""
WAY_S = 0.25
WHOLE_S = LAYERS + (LAYERS + 1) * WAY_S
"""From its user through all layers and back."""


class Guess(Enum):
    """What becomes of the guess of what a token predicts."""

    RIGHT = (False, 1.0)
    WRONG = (True, 1.0)
    UNSURE = (False, 0.0)


RIGHT, WRONG, UNSURE = Guess


def guessing(one: World, guesses: int, guess_s: float) -> World:
    """The same world where users' server, which has nothing else to do, guesses that fast."""
    policy = replace(speculative(), guesses=guesses, guess_confidence=0.5, guess_chance=0.0)
    engine = make_engine(one.deployment.plan, one.profile, one.model, policy)
    dense_s = one.engine.cost.dense_s.copy()
    dense_s[0] = guess_s / LAYERS
    cost = replace(one.engine.cost, dense_s=dense_s)
    assert guess_times_s(cost, 1)[0] == pytest.approx(guess_s)
    informed = make_policy(replace(one.deployment, cost=cost), one.profile, policy)
    return replace(one, engine=replace(engine, cost=cost, policy=informed))


def foreseen(one: World, tokens: Sequence[Guess], servers: int = 1) -> World:
    """The trace's first tokens are guessed as told."""
    wrong = np.zeros((one.trace.token_count, servers), dtype=bool)
    confidence = np.zeros(wrong.shape, dtype=np.float16)
    for number, token in enumerate(tokens):
        wrong[number], confidence[number] = token.value
    trace = replace(one.trace, home_wrong=wrong, home_confidence=confidence)
    return replace(one, trace=trace)


def played(
    tokens: Sequence[Guess], guesses: int, guess_s: float = 1.0, way_s: float = WAY_S
) -> Sample:
    """One request of these tokens, each layer a second away from its user's server and the others
    by `way_s` and taking one second."""
    one = foreseen(guessing(stages(OWN_SERVERS, way_s), guesses, guess_s), tokens)
    return answered(one, np.zeros_like(one.trace.confidence), [len(tokens)])


def test_the_token_after_a_right_guess_follows_one_guess_behind() -> None:
    """b sets out at 1, when what a predicts is guessed:

        0    1    2    3    4
    1:  | a  | b  |
    2:       | a  | b  |
    3:            | a  | b  |
    """
    sample = played([RIGHT, UNSURE], 1, way_s=0.0)
    assert finished_s(sample, 0) == [3.0, 4.0]
    assert sample.token_s.tolist() == [3.0, 1.0]
    assert (sample.drafts, sample.wrong_drafts, sample.withdrawn_layers) == (1, 0, 0)
    assert sample.after.served[1:, DENSE, 1].tolist() == [2, 2, 2]


@pytest.mark.parametrize(("streams", "drafts"), [(1.5, 1), (0.5, 0)])
def test_auto_guesses_while_fewer_answers_are_under_way_than_are_worth_it(
    streams: float, drafts: int
) -> None:
    """One answer, where guesses pay for fewer than so many."""
    one = foreseen(guessing(stages(OWN_SERVERS, WAY_S), 1, 1.0), [RIGHT, UNSURE])
    engine = one.engine
    unbounded = replace(engine, settings=replace(engine.settings, guess_below=1.0))
    below = streams / unbounded.guess_rules.streams[0]
    auto = replace(engine, settings=replace(engine.settings, guess_below=below))
    assert auto.guess_rules.streams[0] == pytest.approx(streams)
    one = replace(one, engine=auto)
    sample = answered(one, np.zeros_like(one.trace.confidence), [2])
    assert sample.drafts == drafts
    last_s = WHOLE_S + 1 if drafts else 2 * WHOLE_S
    assert finished_s(sample, 0) == [WHOLE_S, last_s]


def drafted(
    monkeypatch: pytest.MonkeyPatch,
    along: int,
    count: int,
    *,
    right: float,
    likely: float = 0.0,
    naming_s: float = 0.0,
) -> Sample:
    """One request of `count` tokens on the same route, of whose followers a head drafts `along`."""
    one = foreseen(guessing(stages(OWN_SERVERS, WAY_S), 8, 1.0), [UNSURE] * count)
    each_s = np.full(one.engine.cost.server_count, naming_s)
    cost = replace(one.engine.cost, head_right=right, naming_s=each_s)
    servers = one.engine.cost.server_count
    chosen = DraftsAlong(
        most=np.full(servers, along), likely=np.full(servers, likely), idle=np.zeros(servers, bool)
    )
    monkeypatch.setattr(GuessRules, "drafts_along", lambda *_, **__: chosen)
    one = replace(one, engine=replace(one.engine, cost=cost))
    return answered(one, np.zeros_like(one.trace.confidence), [count])


def test_drafts_of_a_head_come_with_the_token_that_they_follow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three tokens at a time, and the server guesses nothing by itself."""
    sample = drafted(monkeypatch, 2, 6, right=1.0)
    assert finished_s(sample, 0) == [WHOLE_S] * 3 + [2 * WHOLE_S] * 3
    assert sample.after.served[0, HOME, 1] == 0
    assert (sample.drafts, sample.wrong_drafts) == (4, 0)


def test_wrong_drafts_of_a_head_are_withdrawn_and_save_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of them pass the layers with each token, but for the last."""
    sample = drafted(monkeypatch, 2, 3, right=0.0)
    assert finished_s(sample, 0) == [WHOLE_S, 2 * WHOLE_S, 3 * WHOLE_S]
    assert (sample.drafts, sample.wrong_drafts) == (2, 2)
    assert sample.withdrawn_layers == 2 * 2 * LAYERS


def test_a_head_names_drafts_when_the_last_layer_is_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four behind the last token of each batch, a quarter of a second each."""
    whole_s = WHOLE_S + 4 * 0.25
    sample = drafted(monkeypatch, 2, 6, right=1.0, naming_s=0.25)
    assert finished_s(sample, 0) == pytest.approx([whole_s] * 3 + [2 * whole_s] * 3)
    sample = drafted(monkeypatch, 2, 2, right=0.0, naming_s=0.25)
    assert finished_s(sample, 0) == pytest.approx([whole_s, 2 * whole_s])


def test_where_a_head_is_not_sure_nothing_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    sample = drafted(monkeypatch, 2, 3, right=1.0, likely=1.0)
    assert finished_s(sample, 0) == [WHOLE_S, 2 * WHOLE_S, 3 * WHOLE_S]
    assert sample.drafts == 0


def test_a_token_that_follows_too_closely_enters_a_layer_after_the_one_before() -> None:
    """b sets out at 0.75 and waits for the first server, which has a until 1."""
    assert finished_s(played([RIGHT, UNSURE], 1, guess_s=0.75, way_s=0.0), 0) == [3.0, 4.0]


@pytest.mark.parametrize(
    ("guesses", "finished"), [(1, [4, 5, 8, 9]), (2, [4, 5, 6, 8]), (3, [4, 5, 6, 7])]
)
def test_no_more_are_ahead_than_may_be(guesses: int, finished: list[float]) -> None:
    """c might set out at 2, d at 3; a is through at 4, b at 5."""
    assert finished_s(played([RIGHT] * 4, guesses), 0) == finished


def brought(monkeypatch: pytest.MonkeyPatch, per_pass: float, brings: float) -> None:
    """A pass takes as long as so many guesses, and brings so many."""

    def made(*given: Any, **more: Any) -> Any:
        one = make_world(*given, **more)
        taken = {name: per_pass * getattr(one, name) for name in ("pass_s", "pass_ends_s")}
        return one._replace(brings=brings, **taken)

    monkeypatch.setattr("trimmoe.simulator.run.make_world", made)


@pytest.mark.parametrize(
    ("tokens", "guesses", "finished"),
    [
        ([RIGHT] * 4, 3, [4, 6.5, 6.5, 6.5 + 2.5]),
        ([RIGHT] * 4, 1, [4, 6.5, 4 + 4, 6.5 + 4]),
        ([WRONG, RIGHT, RIGHT, RIGHT], 2, [4, 8, 8 + 2.5, 8 + 2.5]),
    ],
)
def test_a_pass_that_brings_two_guesses_takes_as_long_as_both(
    monkeypatch: pytest.MonkeyPatch, tokens: list[Guess], guesses: int, finished: list[float]
) -> None:
    brought(monkeypatch, 2.5, 2.0)
    assert finished_s(played(tokens, guesses), 0) == pytest.approx(finished)


def test_without_a_guess_a_token_waits_for_the_one_before() -> None:
    sample = played([UNSURE, UNSURE], 3)
    assert finished_s(sample, 0) == [WHOLE_S, 2 * WHOLE_S]
    assert sample.drafts == 0


@pytest.mark.parametrize("guess", [RIGHT, WRONG])
def test_a_guess_that_comes_after_full_depth_has_spoken_leads_to_nothing(guess: Guess) -> None:
    """a is through at 4. The server has begun to guess, and is free for b at 6."""
    sample = played([guess, UNSURE], 3, guess_s=1.5 * WHOLE_S)
    assert finished_s(sample, 0) == [WHOLE_S, 1.5 * WHOLE_S + WHOLE_S]
    assert (sample.drafts, sample.withdrawn_layers) == (0, 0)
    assert sample.after.served[1:, DENSE, 1].tolist() == [2, 2, 2]


@pytest.mark.parametrize(("guesses", "served"), [(1, [3, 3, 3]), (2, [4, 4, 3]), (3, [5, 4, 3])])
def test_what_set_out_on_a_wrong_guess_ends_where_word_has_come_that_it_was_wrong(
    guesses: int, served: list[int]
) -> None:
    """Copies set out at 1, 2 and 3; a's word is with its user at 4 and everywhere at 4.25. The
    first copy enters the last layer at 3.75; the second would at 4.75, after the second layer; the
    third would enter that at 4.5."""
    sample = played([WRONG, UNSURE], guesses)
    assert finished_s(sample, 0) == [WHOLE_S, 2 * WHOLE_S]
    assert (sample.drafts, sample.wrong_drafts) == (1, 1)
    assert sample.after.served[1:, DENSE, 1].tolist() == served
    assert sample.withdrawn_layers == sum(served) - 2 * LAYERS
    np.testing.assert_array_equal(sample.after.sent[0], sample.all_ledger.messages)


def test_what_sets_out_on_a_wrong_guess_waits_for_room_too() -> None:
    """b sets out at 1. Its wrong guess is made at 2, but followed when a is through, at 4; b is at
    5, and word of it in the second layer at 5.25, before the copy."""
    sample = played([RIGHT, WRONG, UNSURE], 1)
    assert finished_s(sample, 0) == [4.0, 5.0, 9.0]
    assert sample.withdrawn_layers == 1


def test_copies_wait_for_the_token_that_they_follow() -> None:
    """The last layer takes ten seconds: a copy that comes there waits until a has left it, and is
    withdrawn then."""
    one = stages(OWN_SERVERS, 0.0)
    one = foreseen(guessing(one, 2, 1.0), [WRONG, UNSURE])
    dense_s = one.engine.cost.dense_s.copy()
    dense_s[3] = 10.0
    one = replace(one, engine=replace(one.engine, cost=replace(one.engine.cost, dense_s=dense_s)))
    sample = answered(one, np.zeros_like(one.trace.confidence), [2])
    assert finished_s(sample, 0)[0] == 12.0
    # Both copies pass the first two layers.
    assert sample.after.served[1:3, DENSE, 1].tolist() == [4, 4]


def test_nothing_follows_the_last_token_of_a_request() -> None:
    for guess in Guess:
        sample = played([guess], 3)
        assert finished_s(sample, 0) == [WHOLE_S]
        assert (sample.drafts, sample.withdrawn_layers) == (0, 0)
        assert sample.after.served[1:, DENSE, 1].tolist() == [1, 1, 1]


def test_every_server_has_guesses_of_its_own() -> None:
    one = guessing(stages(OWN_SERVERS, WAY_S), 1, 1.0)
    servers = one.deployment.plan.cluster.server_count
    one = foreseen(one, [RIGHT, UNSURE], servers)
    assert one.trace.home_confidence is not None
    for server, took_s in ((0, 5.0), (1, 8.0)):
        mine = np.zeros_like(one.trace.home_confidence)
        mine[0, server] = 1.0
        trace = replace(one.trace, home_confidence=mine)
        sample = answered(replace(one, trace=trace), np.zeros_like(one.trace.confidence), [2])
        assert finished_s(sample, 0) == [4.0, took_s]


@settings(max_examples=40)
@given(
    st.lists(st.sampled_from(Guess), min_size=1, max_size=10), st.integers(1, 4),
    st.sampled_from([(1.0, 0.25), (2.0, 0.25), (1.5, 1.5), (3.0, 1.5)]),
)  # fmt: skip
def test_a_lone_stream_takes_what_its_schedule_takes(
    tokens: list[Guess], guesses: int, times_s: tuple[float, float]
) -> None:
    """Where no two layers share a server. At these times whatever sets out does so a second after
    others at least, so that nobody meets who set out before, and at the end of a guess that is not
    wanted any more."""
    guess_s, way_s = times_s
    sample = played(tokens, guesses, guess_s, way_s)
    log = sample.all_units
    whole_s = LAYERS + (LAYERS + 1) * way_s
    lead = Lead(guesses=guesses, guess_s=guess_s)
    passed = [
        lead.after(whole_s, guessed=token is not UNSURE, right=token is RIGHT)
        for token in tokens[:-1]
    ]
    passed.append(lead.after(whole_s, guessed=False, right=False))
    expected_s = [one.interval_s for one in passed]
    np.testing.assert_allclose(np.diff(log.began_s), expected_s[:-1])
    np.testing.assert_allclose(log.finished_s - log.began_s, whole_s)
    assert sample.token_s.sum() == pytest.approx(sum(expected_s))
    # Ledgers also have the microseconds of the experts, which the policy does not know to be free.
    np.testing.assert_allclose(log.expected_s, expected_s, rtol=1e-4)
    assert sample.withdrawn_layers <= LAYERS * sum(one.in_vain for one in passed)
    more_s = sample.after.server_busy_s[1:].sum() - LAYERS * len(tokens)
    assert more_s == pytest.approx(sample.withdrawn_layers)
    np.testing.assert_array_equal(sample.after.sent[0], sample.all_ledger.messages)


def test_a_token_waits_for_the_layers_that_a_guess_is_in() -> None:
    """The guess takes six seconds for three layers at once, and a is through at 4.5."""
    sample = played([RIGHT, UNSURE], 3, guess_s=6.0, way_s=0.375)
    assert finished_s(sample, 0) == [4.5, 10.5]
    assert sample.after.server_busy_s[0] == 6.0
    assert sample.drafts == 0


def test_guesses_take_what_is_left_of_a_server() -> None:
    """All is on one server, where a layer of a token and of a guess take a second each. a comes
    first in every layer, and is through before its guess has begun."""
    one = foreseen(guessing(stages([0, 0, 0]), 3, LAYERS), [RIGHT, UNSURE])
    sample = answered(one, np.zeros_like(one.trace.confidence), [2])
    assert finished_s(sample, 0) == [3.0, 6.0]
    assert sample.drafts == 0


@pytest.mark.parametrize("guess", Guess)
def test_every_token_but_the_last_is_guessed_after(guess: Guess) -> None:
    """A server does not know before how sure it is going to be."""
    sample = played([guess] * 3, 1)
    copies = 2 * (guess is WRONG)
    assert sample.after.served[0, HOME, 1] == 2 * LAYERS
    assert sample.after.server_busy_s[0] == pytest.approx(2.0)
    assert sample.after.served[1, DENSE, 1] == 3 + copies


def test_guesses_of_several_requests_read_weights_together() -> None:
    one = foreseen(guessing(stages(OWN_SERVERS, WAY_S), 1, 1.5), [RIGHT] * 2 * LENGTH)
    sample = answered(one, np.zeros_like(one.trace.confidence), [2, 2])
    assert sample.after.served[0, HOME].tolist() == [1, 2 * LAYERS]
    assert sample.after.server_busy_s[0] == 1.5
    assert finished_s(sample, 0) == finished_s(sample, 1) == [4.0, 5.5]


def loaded(**changes) -> World:
    return world("speculative", layers=5, **changes)


@settings(max_examples=10)
@given(
    st.integers(0, 2**31), st.integers(1, 5), st.sampled_from([1.0, 30.0]),
    st.sampled_from([0.05, 10.0]), st.integers(1, 4), st.booleans(),
)  # fmt: skip
def test_what_is_sent_and_done_is_what_the_books_say(
    seed: int, servers: int, factor: float, control_s: float, guesses: int, fed: bool
) -> None:
    """Under load, with prompts, with decisions that are forgotten and made anew, to the last
    vector; every request gets its tokens in order."""
    one = loaded(seed=seed, servers=servers, guesses=guesses)
    one = replace(one, engine=slowed(one.engine, factor))
    sample = drained(one, control_s=control_s, waiting_feedback=fed)
    np.testing.assert_array_equal(sample.after.sent, sample.after.received)
    np.testing.assert_array_equal(sample.after.sent[0], sample.all_ledger.messages)
    log = sample.all_units
    passed = sample.after.served[:, DENSE, 1].sum()
    assert passed == 5 * log.decoded.sum() + sample.withdrawn_layers
    assert sample.all_ledger.kinds.sum(axis=1).tolist() == [sample.all_ledger.tokens] * 5
    assert 0 <= sample.withdrawn_layers <= 5 * guesses * sample.wrong_drafts
    assert sample.after.area == pytest.approx((log.finished_s - log.began_s).sum())
    assert sample.token_s.size == sample.ledger.tokens == log.decoded.sum()
    for request in range(40):
        mine = log.request == request
        began_s, finished = log.began_s[mine & log.decoded], log.finished_s[mine & log.decoded]
        assert log.number[mine].tolist() == list(range(mine.sum()))
        assert (np.diff(began_s) >= 0).all()
        assert (np.diff(finished) >= 0).all()
        # No more under way than those of which the guesses may be unconfirmed, and one.
        assert (began_s[guesses + 1 :] >= finished[: -guesses - 1]).all()


def alone(one: World) -> Sample:
    load = Load(concurrency=1, output_tokens=40, prefill=Prefill.EXCLUDED)
    return one.run(load, duration_s=30.0)


def test_streams_are_faster_and_more_is_sent() -> None:
    one = loaded()
    exact, ours = (alone(each) for each in (world("exact", layers=5), one))
    shown = figures(ours, 0.3)
    assert ours.token_s.mean() < 0.9 * exact.token_s.mean()
    assert ours.ledger.hops / ours.ledger.tokens > exact.ledger.hops / exact.ledger.tokens
    wrong, confidence = one.trace.home_wrong, one.trace.home_confidence
    assert wrong is not None
    assert confidence is not None
    sure = confidence >= one.engine.settings.guess_confidence
    assert shown["drafts_per_token"] == pytest.approx(sure.mean(), abs=0.05)
    assert shown["wrong_draft_share"] == pytest.approx(wrong[sure].mean(), abs=0.05)
    assert shown["withdrawn_layers_per_token"] > 0


def test_sure_and_right_guesses_are_faster_still() -> None:
    one = loaded()
    means = []
    for token in (RIGHT, UNSURE, WRONG):
        means.append(alone(foreseen(one, [token] * one.trace.token_count)).token_s.mean())
    assert means[0] < 0.8 * means[1]
    assert means[2] == pytest.approx(means[1], rel=0.05)


@pytest.mark.parametrize(("times", "busy"), [(0.0, 0.0), (1.0, 0.5), (99.0, 0.99)])
def test_where_servers_are_busy_with_others_fewer_guesses_are_followed(
    times: float, busy: float
) -> None:
    """Waiting as long as being served is being busy half of the time: of as many streams as there
    are, all but one are somebody else's."""
    one = loaded()
    service_s = one.engine.cost.expert_s.mean(axis=(1, 2))
    bold = replace(one.engine.settings, guess_chance=0.15, guesses=16)
    cost = one.engine.cost.with_waiting(times * service_s)
    waiting = replace(one.engine, cost=cost, settings=bold)
    for streams in (1, 4):
        least = max(0.15, busy * (1.0 - 1.0 / streams))
        assert waiting.guess_rules.least_among(streams) == pytest.approx(least)
    feed = TraceFeed(trace=one.trace)
    followed = Ahead(
        engine=waiting, along=DraftsAlong.none(1), feed=feed, seed=0, budget=0.0, confidence=0.9
    )
    tokens = np.arange(LENGTH)
    for request in range(LENGTH):
        followed.open(request, 0)
    nothing = np.zeros(LENGTH, dtype=np.int64)
    none = nothing.astype(bool)
    journey = followed.decide(tokens, nothing, tokens, tokens, none, prompted=none)
    chance, least = feed.chances(bold, 1)[0], max(0.15, busy * (1.0 - 1.0 / LENGTH))
    room = window(float(chance), least, 16)
    assert (journey.window == room).all()
    assert chance**room >= least > chance ** (room + 1)
    assert one.trace.home_confidence is not None
    sure = one.trace.home_confidence[tokens, 0] >= bold.guess_confidence
    assert ((journey.guess == NONE) == (room == 0)).all(), "none is made that nothing may follow"
    if room:
        np.testing.assert_array_equal(journey.guess != UNSURE_GUESS, sure)


def test_tokens_in_flight_are_told_in_order() -> None:
    """Decisions made anew know what those decided that have begun, however rows are numbered."""
    nothing = np.zeros(3, dtype=np.int64)
    requests = Requests(
        arrival_s=np.zeros(3), access=nothing, sequence=nothing, offset=nothing, prompt=nothing,
        output=nothing + 9,
    )  # fmt: skip
    table, rows = RequestTable.of(requests, 1), make_rows(8, LAYERS, 1)
    # One with three of them, one with none, and one without guesses, whose next token is decided.
    table.asked.row[:], table.asked.newest[:] = [6, NONE, 1], [2, NONE, NONE]
    rows.after[[6, 4, 1]] = 4, 2, 5
    assert table.flying(rows) == [6, 4, 2, 1]


def replayed(one: World, access: Sequence[int]):
    return replay(one.engine, one.trace, np.array(access), budget=0.0, confidence=0.9)


def test_a_replay_books_what_leads_say_of_the_same_tokens() -> None:
    access = np.arange(SEQUENCES) % 4
    one = loaded()
    plain = replayed(replace(one, engine=world("exact", layers=5).engine), access.tolist())
    ours = replayed(one, access.tolist())
    guess_s = guess_times_s(one.engine.cost, one.model.top_k)
    wrong, confidence = one.trace.home_wrong, one.trace.home_confidence
    assert wrong is not None
    assert confidence is not None
    in_vain = 0
    for sequence, server in enumerate(access.tolist()):
        settings = one.engine.settings
        lead = Lead(
            guesses=settings.guesses, guess_s=float(guess_s[server]), least=settings.guess_chance
        )
        for number in range(LENGTH):
            token = sequence * LENGTH + number
            sure = bool(confidence[token, 0] >= settings.guess_confidence)
            guessed = sure and number < LENGTH - 1
            right = guessed and not wrong[token, 0]
            passed = lead.after(plain[token].delay_s, guessed=guessed, right=right)
            assert ours[token].delay_s == passed.interval_s
            assert ours[token].hops == plain[token].hops * (1 + passed.in_vain)
            in_vain += passed.in_vain
    assert in_vain > 0
    assert sum(each.delay_s for each in ours) < sum(each.delay_s for each in plain)


def test_a_replay_takes_what_a_lone_stream_takes() -> None:
    """The same tokens, in both drivers."""
    tokens = [RIGHT, WRONG, RIGHT, RIGHT, UNSURE, RIGHT, RIGHT, RIGHT, WRONG, RIGHT]
    assert len(tokens) == LENGTH
    one = foreseen(guessing(stages(OWN_SERVERS, WAY_S), 2, 1.0), tokens)
    sample = answered(one, np.zeros_like(one.trace.confidence), [LENGTH])
    ledgers = replayed(one, [0] * SEQUENCES)[:LENGTH]
    assert [each.delay_s for each in ledgers] == sample.all_units.expected_s.tolist()
    assert sum(each.delay_s for each in ledgers) == pytest.approx(sample.token_s.sum(), rel=1e-4)


def test_who_does_not_know_what_servers_guess_is_told_how_to() -> None:
    one = loaded()
    unknown = replace(one, trace=replace(one.trace, home_wrong=None))
    elsewhere = foreseen(one, [], servers=3)
    for trace, said in ((unknown, "record --plan"), (elsewhere, "3 servers would guess")):
        with pytest.raises(UserError, match=said):
            trace.run(Load(rate_per_s=1.0))
        with pytest.raises(UserError, match=said):
            replayed(trace, [0] * SEQUENCES)
    # Nobody else asks.
    plain = replace(unknown, engine=world("exact", layers=5).engine)
    assert len(replayed(plain, [0] * SEQUENCES)) == SEQUENCES * LENGTH


def test_the_papers_accounting_has_no_guesses() -> None:
    one = world("speculative", accounting=Accounting.MIGRATE)
    with pytest.raises(UserError, match="no guesses"):
        one.run(Load(rate_per_s=1.0, prefill=Prefill.EXCLUDED))


def drawn(agreement: float) -> Trace:
    return generate_trace(
        world().model,
        Parameters(home_agreement=agreement),
        sequences=100,
        length=100,
        seed=3,
        structure_seed=0,
        profile_hash="p",
    )


def test_generated_guesses_are_as_right_and_as_sure_as_measured() -> None:
    trace = drawn(0.6)
    wrong, confidence = trace.home_wrong, trace.home_confidence
    assert wrong is not None
    assert confidence is not None
    assert wrong.mean() == pytest.approx(0.4, abs=0.02)
    for least, share, right in ((0.15, 0.71, 0.76), (0.3, 0.4, 0.875)):
        sure = confidence >= least
        assert sure.mean() == pytest.approx(share, abs=0.02)
        assert 1 - wrong[sure].mean() == pytest.approx(right, abs=0.02)
    assert confidence.min() >= 0
    assert confidence.max() <= 1


def test_guesses_are_drawn_apart_from_everything_else() -> None:
    one, other = drawn(0.6), drawn(0.9)
    for name in ("experts", "masses", "importance", "steadiness", "confidence", "exit_at"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_array_equal(one.probabilities, other.probabilities)
    assert one.home_wrong is not None
    assert other.home_wrong is not None
    assert other.home_wrong.sum() < 0.5 * one.home_wrong.sum()


@pytest.mark.parametrize("known", [True, False])
def test_a_file_says_what_servers_guess_or_that_nobody_knows(known: bool, tmp_path: Path) -> None:
    trace = drawn(0.6)
    if not known:
        trace = replace(trace, home_wrong=None, home_confidence=None)
    trace.save(tmp_path / "trace")
    found = load_trace(tmp_path / "trace")
    assert (found.home_wrong is not None) == (found.home_confidence is not None) == known
    assert found.hash == trace.hash


@pytest.mark.parametrize(("predicted", "second_s"), [(RIGHT, 1.0), (UNSURE, WHOLE_S)])
def test_the_first_token_is_guessed_while_its_prompt_is_on_its_way(
    predicted: Guess, second_s: float
) -> None:
    """Then the second token comes right behind it."""
    one = foreseen(guessing(stages(OWN_SERVERS, WAY_S), 2, 1.0), [UNSURE, predicted, UNSURE])
    sample = answered(one, np.zeros_like(one.trace.confidence), [2], prompt=2)
    assert sample.token_s.tolist() == [second_s], "of the second token"


@pytest.mark.parametrize(("guess_s", "second_s"), [(1.0, 1.0), (3.0, 3.0)])
def test_the_whole_prompt_is_read_for_that_guess(guess_s: float, second_s: float) -> None:
    """Two rows take twice as long as one everywhere. The prompt has the last server until 6.75 and
    is with its user at 7; what is guessed sets out at 2 or at 6, and is there at 8 or at 10."""
    one = foreseen(guessing(stages(OWN_SERVERS, WAY_S), 2, guess_s), [UNSURE, RIGHT, UNSURE])
    confidence = np.zeros_like(one.trace.confidence)
    sample = answered(one, confidence, [2], prompt=2, batch_share=0.0)
    assert sample.first_token_s.tolist() == [7.0]
    assert sample.token_s.tolist() == [second_s]
