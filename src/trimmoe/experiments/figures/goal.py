"""The goal: far below lossless execution at few measured flips; against others' and our own.

What a user could run instead are other people's lossless methods on the placements they come with.
Exact execution on our own plan is one more step: what is below it is owed to trimming alone.
"""

from __future__ import annotations

from trimmoe.experiments.figures.base import Content, change, fastest_lossless, find, percent
from trimmoe.experiments.figures.contenders import GUESSED

SAVED = -0.30
"""Against lossless execution."""
FLIPS = 0.02
"""Of the tokens, at most."""
OURS = "TrimMoE"
"""Our curve in the figure of equal quality."""

_ASKED = (
    f"The goal, at least {-SAVED:.0%} below the best lossless alternative at no more than "
    f"{FLIPS:.0%} measured flips"
)
_MEASURE = (
    "trimmoe experiment all --model CHECKPOINT --profile PROFILE --trace TRACE --plan PLAN "
    "--measure --text HELD_OUT -o FOLDER"
)


def goal_sentences(curves: Content) -> list[str]:
    """What came of it, from the JSON of the figure of equal quality."""
    executed = curves.get("executed")
    found = _measured(executed) if executed else _charged(curves)
    return found + _guessed(executed["lossless"] if executed else curves["lossless"])


def _guessed(rows: list[Content]) -> list[str]:
    """What guesses make of it, which cost no quality."""
    ours = find(rows, GUESSED)
    if ours is None:
        return []
    found = []
    for label, theirs in _alternatives(rows):
        if theirs is not None:
            key = "mb_per_1000_tokens"
            traffic = percent(change(ours[key], theirs[key]), signed=True)
            found.append(
                f"{_ASKED}, {_verdict(ours, theirs)} by `speculative`, which flips none, "
                f"against {label}: {_beside(ours, theirs)}; traffic {traffic}."
            )
    return found


def within(points: list[Content], key: str, most: float) -> Content | None:
    """The fastest of our points at which `key` is at most that."""
    good = [p for p in points if p["curve"] == OURS and p[key] <= most]
    return min(good, key=lambda point: point["delay_ms"]) if good else None


def _measured(executed: Content) -> list[str]:
    """Judged where the whole 95 % interval of the flips is within the goal's."""
    ours = within(executed["points"], "flip_rate_high_95", FLIPS)
    if ours is None:
        return [
            f"{_ASKED}, is not shown: at no budget of the sweep does the 95 % interval of the "
            f"measured flips end within {FLIPS:.0%}; execute more --passages."
        ]
    flips = (
        f"at a budget of {percent(float(ours['setting']))} {percent(ours['flip_rate'])} of "
        f"{ours['tokens']} tokens flip, 95 % interval {percent(ours['flip_rate_low_95'])} to "
        f"{percent(ours['flip_rate_high_95'])}"
    )
    found = []
    for label, theirs in _alternatives(executed["lossless"]):
        if theirs is None:
            found.append(f"{_ASKED}, cannot be judged against {label}: none can place the model.")
            continue
        found.append(
            f"{_ASKED}, {_verdict(ours, theirs)} against {label}: {_beside(ours, theirs)}; {flips}."
        )
    return found


def _charged(curves: Content) -> list[str]:
    """What is known without execution: delays, and what calibration charges."""
    ours = within(curves["points"], "charged_loss_per_token", FLIPS)
    found = [
        f"{_ASKED}, is not judged: flips were not measured, only what calibration charges is "
        f"known. `{_MEASURE}` measures them, for which weights are needed."
    ]
    if ours is None:
        return found
    charged = f"{ours['charged_loss_per_token']:.4f} charged per token"
    for label, theirs in _alternatives(curves["lossless"]):
        beside = "none can place the model" if theirs is None else _beside(ours, theirs)
        found.append(f"By charges alone, against {label}: {beside}; {charged}, not measured.")
    return found


def _alternatives(rows: list[Content]) -> tuple[tuple[str, Content | None], ...]:
    return (
        ("the best lossless method of others", fastest_lossless(rows, ours=False)),
        (
            "exact execution on our own plan",
            fastest_lossless(rows, ours=True),
        ),
    )


def _verdict(ours: Content, theirs: Content) -> str:
    saved = change(ours["delay_ms"], theirs["delay_ms"]) or 0.0
    return "is reached" if saved <= SAVED else "is not reached"


def _beside(ours: Content, theirs: Content) -> str:
    saved = percent(change(ours["delay_ms"], theirs["delay_ms"]), signed=True)
    return f"{saved} ({ours['delay_ms']:.2f} ms, {theirs['title']} {theirs['delay_ms']:.2f} ms)"
