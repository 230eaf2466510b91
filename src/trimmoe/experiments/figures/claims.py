"""The paper's claims and ours beside them: the table that heads the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from trimmoe.experiments.figures.base import Content, change, fastest_lossless, find
from trimmoe.experiments.figures.overall import bound_sentence

Contents = dict[str, Content]
"""JSONs by figure number."""

COLUMNS = {
    "letter": "migrate, the paper's preset (not physical)",
    "moving": "the same, every baseline migrating too",
    "pinned_own": "pinned, default preset; baselines on their own placements",
    "pinned_best": "pinned, default preset; native EdgeShard, baselines on our plan",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One number of the paper, and where ours comes from."""

    text: str
    paper: float | None
    """A share; None where the paper says nothing."""
    ours: Callable[[Contents, str], float | None]
    """By column; None where it has no counterpart."""
    less_is_better: bool = True
    kind: Literal["change", "share", "ratio"] = "change"


def _against(key: str, of: str, figure: str = "4") -> Callable[[Contents, str], float | None]:
    def ours(contents: Contents, column: str) -> float | None:
        rows = contents[figure]["arenas"].get(column, [])
        mine, theirs = find(rows, "trimmoe"), find(rows, of)
        return None if mine is None or theirs is None else change(mine[key], theirs[key])

    return ours


def _throughput(contents: Contents, column: str) -> float | None:
    more = _against("saturated_tokens_per_s", "edgeshard")(contents, column)
    return None if more is None else 1.0 + more


def _own(key: str) -> Callable[[Contents, str], float | None]:
    def ours(contents: Contents, column: str) -> float | None:
        mine = find(contents["4"]["arenas"].get(column, []), "trimmoe")
        return None if mine is None else mine[key]

    return ours


_HORIZON = {
    "letter": "migrate, the paper's preset (not physical)",
    "pinned_own": "pinned, the paper's placement at home",
    "pinned_best": "pinned, our plan",
}


def _horizon(key: str) -> Callable[[Contents, str], float | None]:
    def ours(contents: Contents, column: str) -> float | None:
        rows = contents["8"]["curves"].get(_HORIZON.get(column, ""), [])
        by_horizon = {row["horizon"]: row for row in rows}
        if not {"1", "3"} <= by_horizon.keys():
            return None
        return change(by_horizon["3"][key], by_horizon["1"][key])

    return ours


def _served(contents: Contents, column: str) -> float | None:
    arena = {"letter": "letter/paper", "pinned_best": "pinned/trimmoe"}.get(column)
    rows = [r for r in contents["11"]["rows"] if r["key"] == arena and r["rate_per_s"] == 80.0]
    return rows[0]["sla_share"] if rows else None


def _lossless(*, ours: bool) -> Callable[[Contents, str], float | None]:
    def saved(contents: Contents, column: str) -> float | None:
        rows = contents["4"]["arenas"].get(column, [])
        mine, exact = find(rows, "trimmoe"), fastest_lossless(rows, ours=ours)
        return (
            None if mine is None or exact is None else change(mine["delay_ms"], exact["delay_ms"])
        )

    return saved


CLAIMS = (
    Claim(text="latency against EdgeShard", paper=-0.628, ours=_against("delay_ms", "edgeshard")),
    Claim(text="latency against MoE^2", paper=-0.396, ours=_against("delay_ms", "moe2")),
    Claim(
        text="latency against Substitute-Only",
        paper=-0.245,
        ours=_against("delay_ms", "substitute-only"),
    ),
    Claim(
        text="traffic against EdgeShard",
        paper=-0.772,
        ours=_against("mb_per_1000_tokens", "edgeshard"),
    ),
    Claim(
        text="traffic against Substitute-Only",
        paper=-0.300,
        ours=_against("mb_per_1000_tokens", "substitute-only"),
    ),
    Claim(text="remote execution ratio", paper=0.16, ours=_own("remote_share"), kind="share"),
    Claim(
        text="throughput over EdgeShard's",
        paper=2.35,
        ours=_throughput,
        less_is_better=False,
        kind="ratio",
    ),
    Claim(
        text="P99 against EdgeShard",
        paper=-0.640,
        ours=_against("request_p99_ms", "edgeshard", "5"),
    ),
    Claim(text="P99 against MoE^2", paper=-0.411, ours=_against("request_p99_ms", "moe2", "5")),
    Claim(text="latency, H = 3 against H = 1", paper=-0.170, ours=_horizon("delay_ms")),
    Claim(text="traffic, H = 3 against H = 1", paper=-0.291, ours=_horizon("mb_per_1000_tokens")),
    Claim(
        text="within 300 ms at 80 requests/s",
        paper=0.71,
        ours=_served,
        less_is_better=False,
        kind="share",
    ),
    Claim(text="latency against the pipeline", paper=None, ours=_against("delay_ms", "pipeline")),
    Claim(
        text="latency against the best lossless method of others",
        paper=None,
        ours=_lossless(ours=False),
    ),
    Claim(
        text="latency against exact execution on our plan",
        paper=None,
        ours=_lossless(ours=True),
    ),
)


def claim_rows(contents: Contents) -> list[Content]:
    """The head table, JSON-like."""
    return [
        {
            "claim": claim.text,
            "paper": claim.paper,
            "ours": {column: claim.ours(contents, column) for column in COLUMNS},
            "reached": {
                column: _reached(claim, claim.ours(contents, column)) for column in COLUMNS
            },
            "kind": claim.kind,
        }
        for claim in CLAIMS
    ]


def _reached(claim: Claim, ours: float | None) -> bool | None:
    if ours is None or claim.paper is None:
        return None
    return ours <= claim.paper if claim.less_is_better else ours >= claim.paper


def shown(value: float | None, *, kind: str) -> str:
    """A cell of the head table."""
    if value is None:
        return "-"
    if kind == "ratio":
        return f"{value:.2f}x"
    value = round(value, 3) + 0.0  # No "-0.0%".
    return f"{value:.1%}" if kind == "share" or value == 0 else f"{value:+.1%}"


def missed(rows: list[Content], contents: Contents) -> list[str]:
    """A sentence for every claim whose margin is not reached everywhere, with what bounds it."""
    found = []
    for row in rows:
        short = [column for column in COLUMNS if row["reached"][column] is False]
        if short:
            paper = shown(row["paper"], kind=row["kind"])
            parts = [
                f"{shown(row['ours'][column], kind=row['kind'])} {_under(column)}"
                f"{_ceiling(row['claim'], column, contents)}"
                for column in short
            ]
            found.append(
                f"Margin not reached: {row['claim']} (paper {paper}): {'; '.join(parts)}."
                f"{_why(row['claim'], short)}"
            )
    return [*found, bound_sentence(contents["4"]["unloaded"]), *contents["E"]["goal"]]


def _under(column: str) -> str:
    return f"under `{COLUMNS[column]}`"


def _ceiling(claim: str, column: str, contents: Contents) -> str:
    """What a clairvoyant with our actions and budget would reach against the same baseline."""
    of = {
        "latency against EdgeShard": "edgeshard",
        "latency against MoE^2": "moe2",
        "latency against Substitute-Only": "substitute-only",
    }.get(claim)
    if of is None or not column.startswith("pinned"):
        return ""
    theirs = find(contents["4"]["arenas"][column], of)
    assert theirs is not None
    best = change(contents["4"]["unloaded"]["clairvoyant_ms"], theirs["unloaded_ms"])
    reach = shown(best, kind="change")
    return f", where without load a clairvoyant with our actions and budget would reach {reach}"


def _why(claim: str, columns: list[str]) -> str:
    if "H = 3" in claim:
        return " The myopic choice is already near what looking ahead finds, see Fig. 8."
    reasons = []
    if "pinned_best" in columns and "EdgeShard" in claim:
        reasons.append("Natively EdgeShard crosses a link only a few times per token.")
    elif "pinned_best" in columns and "against" in claim:
        reasons.append(
            "On our plan a baseline inherits our placement and routes: only what trimming itself "
            "saves is left to differ."
        )
    if {"letter", "moving"} & set(columns) and "EdgeShard" in claim:
        reasons.append(
            "Where everybody's tokens move for free, EdgeShard's placement needs no return trips "
            "and is a pipeline."
        )
    if claim == "remote execution ratio":
        reasons.append("How much is remote follows from the placement more than from the policy.")
    return "".join(f" {reason}" for reason in reasons)
