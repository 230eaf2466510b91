"""The page and the JSON of a run over the claims."""

from __future__ import annotations

from typing import Any

import trimmoe
from trimmoe.core.artifact import Header
from trimmoe.core.profile import load_profile
from trimmoe.experiments.figures.claim_page import claims_page
from trimmoe.experiments.figures.claim_run import Asked, Claimed


def claims_report(claimed: Claimed, asked: Asked) -> str:
    """`docs/claims.md` of a run."""
    return claims_page(
        claimed.worlds,
        claimed.assumed,
        command=_command(asked),
        notes=_notes(asked),
        inputs=claimed.inputs,
    )


def _command(asked: Asked) -> str:
    given = f"--size {asked.size_name}"
    given += f" --worlds {asked.worlds_asked}" if asked.worlds_asked is not None else ""
    given += f" --seed {asked.seed} --geometry {asked.geometry}"
    if asked.recorded is not None:
        given += f" --model {asked.recorded.model} --profile PROFILE --trace TRACE"
        if asked.recorded.letter_profile is not None:
            given += " --letter-profile PROFILE --letter-trace TRACE"
        given += " --text TEXT" if asked.recorded.text else ""
    return f"trimmoe experiment claims -o FILE {given}"


def _notes(asked: Asked) -> list[str]:
    """What the numbers are of."""
    size, effort, recorded = asked.size, asked.size.effort, asked.recorded
    pinned = asked.geometry if recorded is None else recorded.model
    notes = [
        f"Size `{asked.size_name}`, seed {asked.seed}: worlds are clusters drawn in the ranges of "
        f"the paper's testbed, {asked.worlds}, on each {effort.sequences * effort.length} tokens; "
        f"{asked.geometry} with generated tokens, `pinned` on {pinned}, the other models of Fig. 9 "
        f"with generated tokens. A request is an answer of {effort.output_tokens} tokens; the "
        "paper does not say how many it has. Delays are the cost model's."
    ]
    if recorded is not None and recorded.text:
        tokens = size.passages * size.steps
        notes.append(f"Executed: {tokens} tokens of held-out text on each.")
    if recorded is not None:
        notes.append(measured_at(load_profile(recorded.by_letter().profile).header))
    return notes


def measured_at(header: Header) -> str:
    """How near to the letter the exits of a real model's profile are."""
    heads = {"state": "the state itself", "direction": "its direction, and not the state itself"}
    threshold = header.extra["exit_threshold"]
    where = "nowhere" if threshold is None else f"at a confidence of {threshold:.3g}"
    return (
        "By the letter on the embedded model, exit heads (7) read "
        f"{heads[header.settings.get('exit_heads', 'direction')]}, and where tokens exit (26, 36) "
        f"is measured {where}."
    )


def claims_json(claimed: Claimed, asked: Asked) -> dict[str, Any]:
    """All facts, with all that is needed to repeat them."""
    return {
        "trimmoe_version": trimmoe.__version__,
        "configuration": {"size": asked.size_name, "geometry": asked.geometry},
        "command": _command(asked),
        "seed": asked.seed,
        "input_hashes": claimed.inputs,
        "worlds": {name: [dict(each) for each in facts] for name, facts in claimed.worlds.items()},
        "assumed": [
            {"importance": each.importance, "deeper_skips": each.deeper_skips}
            for each in claimed.assumed
        ],
    }
