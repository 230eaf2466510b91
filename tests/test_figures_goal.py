"""The goal is judged by measured flips, against others' lossless methods and against our own."""

from __future__ import annotations

from typing import Any

import pytest

from trimmoe.experiments.figures.base import fastest_lossless
from trimmoe.experiments.figures.contenders import everybody, pinned_best
from trimmoe.experiments.figures.goal import goal_sentences, within

Row = dict[str, Any]


def lossless(of: str, delay_ms: float, *, title: str = "") -> Row:
    row = {"of": of, "title": title or of, "lossless": True, "delay_ms": delay_ms}
    return row | {"mb_per_1000_tokens": 12.0 if of == "speculative" else 10.0}


ROWS = [lossless("pipeline", 90.0), lossless("edgeshard", 60.0), lossless("exact", 30.0)]


def point(budget: str, delay_ms: float, high: float, *, curve: str = "TrimMoE") -> Row:
    return {
        "curve": curve,
        "setting": budget,
        "delay_ms": delay_ms,
        "tokens": 384,
        "flip_rate": high / 2,
        "flip_rate_low_95": high / 8,
        "flip_rate_high_95": high,
        "charged_loss_per_token": 0.004,
    }


def executed(*points: Row, rows: list[Row] = ROWS) -> Row:
    return {"executed": {"lossless": rows, "points": list(points)}}


def test_the_alternatives_are_those_of_others_and_exact_execution_on_our_plan() -> None:
    lossless = [one for one in pinned_best() if one.lossless]
    others = [one for one in lossless if one.of not in ("exact", "speculative")]
    assert [one.method.title for one in others] == [
        "pipeline",
        "EdgeShard",
        "EdgeShard (throughput)",
        "activation-aware",
        "EPLB, nearest replica",
    ]
    trading = {one.key for one in everybody() if not one.lossless}
    assert {"pinned/trimmoe", "pinned/moe2", "pinned/substitute-only", "letter/paper"} <= trading


def test_the_fastest_of_others_and_our_own_are_kept_apart() -> None:
    trading = {**lossless("moe2", 1.0), "lossless": False}
    theirs = fastest_lossless([*ROWS, trading], ours=False)
    own = fastest_lossless([*ROWS, trading], ours=True)
    assert theirs is not None
    assert own is not None
    assert (theirs["of"], own["of"]) == ("edgeshard", "exact")
    assert fastest_lossless([trading], ours=False) is None


def test_guesses_are_no_alternative_but_judged_like_trimming() -> None:
    rows = [*ROWS, lossless("speculative", 15.0)]
    for ours, of in ((False, "edgeshard"), (True, "exact")):
        best = fastest_lossless(rows, ours=ours)
        assert best is not None
        assert best["of"] == of
    curves = executed(point("0.02", 29.0, 0.019), rows=rows)
    found = [each for each in goal_sentences(curves) if "speculative" in each]
    assert len(found) == 2
    assert all("is reached by" in each and "traffic +20.0%" in each for each in found)
    assert "-75.0% (15.00 ms, edgeshard 60.00 ms)" in found[0]
    assert "-50.0% (15.00 ms, exact 30.00 ms)" in found[1]
    slow = executed(point("0.02", 29.0, 0.019), rows=[*ROWS, lossless("speculative", 25.0)])
    verdicts = [each for each in goal_sentences(slow) if "speculative" in each]
    assert "is not reached" in verdicts[1]


def test_only_points_whose_whole_interval_is_within_two_per_cent_count() -> None:
    points = [point("0.02", 29.0, 0.019), point("0.03", 20.0, 0.021)]
    points.append(point("", 10.0, 0.0, curve="Local-Prior"))
    chosen = within(points, "flip_rate_high_95", 0.02)
    assert chosen is not None
    assert chosen["setting"] == "0.02"
    assert within(points[1:], "flip_rate_high_95", 0.02) is None


@pytest.mark.parametrize(
    ("delay_ms", "against_others", "against_own"),
    [
        (29.0, "is reached", "is not reached"),  # Half of EdgeShard's, hardly less than ours.
        (20.0, "is reached", "is reached"),
        (45.0, "is not reached", "is not reached"),  # A quarter below EdgeShard.
    ],
)
def test_both_are_judged_with_the_measured_flips_and_their_interval(
    delay_ms: float, against_others: str, against_own: str
) -> None:
    others, own = goal_sentences(executed(point("0.02", delay_ms, 0.016)))
    assert f"{against_others} against the best lossless method of others" in others
    assert f"{against_own} against exact execution on our own plan" in own
    for sentence in (others, own):
        assert "0.8% of 384 tokens flip, 95 % interval 0.2% to 1.6%" in sentence
    assert "edgeshard 60.00 ms" in others
    assert "exact 30.00 ms" in own


def test_an_interval_that_reaches_beyond_two_per_cent_shows_nothing() -> None:
    (only,) = goal_sentences(executed(point("0.02", 1.0, 0.03)))
    assert "is not shown" in only
    assert "more --passages" in only


def test_where_nobody_else_can_place_the_model_that_is_said() -> None:
    first, _ = goal_sentences(executed(point("0.02", 29.0, 0.01), rows=ROWS[2:]))
    assert "cannot be judged against the best lossless method of others" in first


def test_without_execution_charges_are_given_as_such_and_the_command_that_measures() -> None:
    said = goal_sentences(
        {"executed": None, "lossless": ROWS, "points": [point("0.02", 27.0, 0.01)]}
    )
    assert "is not judged" in said[0]
    assert "trimmoe experiment all" in said[0]
    assert "--measure --text" in said[0]
    assert "-55.0% (27.00 ms, edgeshard 60.00 ms)" in said[1]
    assert "-10.0% (27.00 ms, exact 30.00 ms)" in said[2]
    assert all("0.0040 charged per token, not measured" in text for text in said[1:])
    assert not any("reached" in text for text in said)
