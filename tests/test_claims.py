"""The page of claims: what comes out, what does not, and by which numbers."""

from __future__ import annotations

import pytest

from trimmoe.experiments.figures.claim_list import CLAIMS, Said, borne_out, less, own
from trimmoe.experiments.figures.claim_page import Assumed, claims_page


def test_numbers_by_hand() -> None:
    facts = {"trimmoe.delay_ms": 30.0, "edgeshard.delay_ms": 40.0}
    assert less("delay_ms", "edgeshard")(facts) == -0.25
    assert own("delay_ms")(facts) == 30.0
    with pytest.raises(KeyError):
        less("delay_ms", "moe2")(facts)


def test_which_side_bears_a_claim_out() -> None:
    def said(better: str) -> Said:
        return Said(where="4", text="any", paper=0.4, ours=None, better=better)  # type: ignore[arg-type]

    assert borne_out(said("less"), 0.39)
    assert not borne_out(said("less"), 0.41)
    assert borne_out(said("more"), 0.41)
    assert not borne_out(said("more"), 0.39)
    assert borne_out(said("near"), 0.31)
    assert not borne_out(said("near"), 0.29)


def test_failures_stand_first_with_their_reason_and_an_interval() -> None:
    """12.5 % and 37.5 % below EdgeShard: 25 % on average, where the paper has 62.8 %."""
    worlds = {
        "letter, generated": [
            {"trimmoe.delay_ms": 35.0, "edgeshard.delay_ms": 40.0, "moe2.delay_ms": 100.0},
            {"trimmoe.delay_ms": 25.0, "edgeshard.delay_ms": 40.0, "moe2.delay_ms": 100.0},
        ],
        "pinned": [{}],
    }
    assumed = [
        Assumed(importance=(0.4, 0.6), deeper_skips=-0.5),
        Assumed(importance=(0.6, 0.4), deeper_skips=None),
    ]
    page = claims_page(worlds, assumed, command="trimmoe x", notes=["Noted."])
    failed, rest = page.split("## Comes out")[0], page.split("## Comes out")[1]
    row = next(line for line in failed.splitlines() if "latency against EdgeShard" in line)
    assert "-62.8%" in row
    assert "-25.0% (" in row
    assert "| - |" in row, "nothing is known of the other column"
    assert "shard" in row
    assert "latency against MoE^2 |" in rest
    assert "## Not measured" in page
    assert "| 0.4 to 0.6 | -50% |" in page
    assert "no skips" in page


def test_every_claim_that_can_fail_says_why() -> None:
    for said in CLAIMS:
        bound = said.text.startswith("charged degradation")
        assert said.why or said.ours is None or bound, said.text
