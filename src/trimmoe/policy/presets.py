"""Policies by name: each a function that bundles options."""

from __future__ import annotations

from dataclasses import replace

from trimmoe.core.choice import DEFAULT_BUDGET
from trimmoe.core.profile import DRAFT_CONFIDENCE
from trimmoe.cost.actions import Levers
from trimmoe.cost.guessing import GUESSES
from trimmoe.cost.model import Accounting
from trimmoe.policy.readings import ExitRule, Readings, WeightRule
from trimmoe.policy.settings import PolicySettings

GUESS_BELOW = 0.75
"""Share of what its machines can do that a route is at work for from which on guesses cost others
more than they save; measured, see docs/performance.md."""

RING_DRAFTS = 4
"""Tokens that a ring of stages verifies at a time, behind the one that is known."""


def trimmoe() -> PolicySettings:
    """The default: all levers, with the readings of the design document; exits are drafts."""
    return PolicySettings(
        name="trimmoe", levers=Levers(stand_in=True), draft_confidence=DRAFT_CONFIDENCE
    )


def final_exits() -> PolicySettings:
    """The default, but that a prediction is answered at its exit: no word of it waits for full
    depth, and what it may flip is charged."""
    return replace(trimmoe(), name="final-exits", draft_confidence=None)


def lossless() -> PolicySettings:
    """Every slot's target at its fastest host; drafts save waiting and nothing is approximated. It
    looks ahead, lest a draft takes longer to its user than what it saves."""
    plain = exact()
    return replace(
        plain,
        name="lossless",
        horizon=None,
        levers=replace(plain.levers, exit=True),
        draft_confidence=DRAFT_CONFIDENCE,
    )


def speculative() -> PolicySettings:
    """Exact execution of tokens that users' own servers guess ahead, several under way at once."""
    return replace(exact(), name="speculative", guesses=GUESSES)


def ring(drafted: int = RING_DRAFTS) -> PolicySettings:
    """What public systems do over slow links: so many tokens are drafted, however improbable, and
    verified in one pass through the stages; then the next ones."""
    return replace(
        exact(),
        name="ring",
        guesses=drafted,
        guess_chunks=True,
        guess_chance=0.0,
        guess_confidence=0.0,
    )


def auto() -> PolicySettings:
    """Exact execution, and `speculative` for as long as that is faster: where machines have time to
    spare, and guesses take less than the way through the servers."""
    return replace(speculative(), name="auto", guess_below=GUESS_BELOW)


def auto_within() -> PolicySettings:
    """`auto` where there is a budget: `relaxed`, with guesses as `auto` makes them; and `trimming`
    while an expert has no host."""
    return replace(relaxed(), name="auto", guess_below=GUESS_BELOW, in_need=trimming().levers)


def relaxed() -> PolicySettings:
    """`speculative`, but that guesses that are nearly right are kept, within the budget."""
    return replace(speculative(), name="relaxed", relaxed=True, budget=DEFAULT_BUDGET)


def trimming() -> PolicySettings:
    """The default's skips, drops and substitutes where a token would have to leave its server. It
    passes all other layers in one go, as under `exact`; there are no exits."""
    whole = trimmoe()
    levers = replace(whole.levers, exit=False, local=False)
    return replace(whole, name="trimming", levers=levers, draft_confidence=None)


def guessing() -> PolicySettings:
    """`trimming`, on tokens that users' own servers guess ahead. A guessed token spends its own
    credit only, see `TokensArrived`."""
    return replace(trimming(), name="guessing", guesses=GUESSES)


def paper() -> PolicySettings:
    """The paper to the letter: migrating tokens, whole-layer skips, three layers ahead, and all
    that `Readings.letter` has."""
    return PolicySettings(
        name="paper",
        levers=Levers(drop_slots=False),
        horizon=3,
        accounting=Accounting.MIGRATE,
        readings=Readings.letter(),
    )


def paper_substitute_only() -> PolicySettings:
    """The predecessor read as `paper` reads its successor, so that they differ in nothing but what
    the paper adds: skips, exits and the look-ahead."""
    letter = paper()
    return replace(
        letter,
        name="paper-substitute-only",
        horizon=1,
        levers=replace(letter.levers, skip=False, exit=False),
    )


def exact() -> PolicySettings:
    """Exact nearest-replica execution: every slot's target at its fastest host, full depth."""
    return PolicySettings(
        name="exact",
        levers=Levers(substitute=False, drop_slots=False, skip=False, exit=False),
        horizon=1,
        budget=0.0,
        readings=Readings(
            weight_rule=WeightRule.FIXED,
            exit_rule=ExitRule.FIXED,
            audit_share=0.0,
            price_start=False,
        ),
    )


def substitute_only() -> PolicySettings:
    """The predecessor: similar experts stand in, every layer of every token runs."""
    return replace(
        final_exits(),
        name="substitute-only",
        levers=Levers(drop_slots=False, skip=False, exit=False),
    )


PRESETS = {
    "auto": auto,
    "trimmoe": trimmoe,
    "trimming": trimming,
    "guessing": guessing,
    "lossless": lossless,
    "speculative": speculative,
    "relaxed": relaxed,
    "final-exits": final_exits,
    "substitute-only": substitute_only,
    "exact": exact,
    "paper": paper,
}
