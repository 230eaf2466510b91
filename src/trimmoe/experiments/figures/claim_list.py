"""What the paper's abstract, section VI and figures 4 to 11 say in numbers, and what ours are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Facts = Mapping[str, float]
"""One world's measurements in one column: `method.figure`, such as `edgeshard.delay_ms`."""
Value = Callable[[Facts], float]
"""From facts to the claim's number; raises `KeyError` where one of them is missing."""
Better = Literal["less", "more", "near"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """One number of the paper's."""

    where: str
    text: str
    paper: float
    ours: Value | None
    """None: nothing here measures it."""
    kind: Literal["change", "share", "ratio", "plain"] = "change"
    better: Better = "less"
    """Which side of the paper's number still bears the claim out; `near`: within a quarter."""
    why: str = ""
    """One sentence for where ours differs."""


def less(key: str, of: str, mine: str = "trimmoe") -> Value:
    """The relative change of a figure from another method's to ours."""
    return lambda facts: facts[f"{mine}.{key}"] / facts[f"{of}.{key}"] - 1.0


def own(key: str, of: str = "trimmoe") -> Value:
    """A figure itself."""
    return lambda facts: facts[f"{of}.{key}"]


def more_than_whole(variant: str, key: str) -> Value:
    """What an ablation adds to the whole."""
    return less(key, "whole", variant)


_PLACEMENT = (
    "EdgeShard runs by itself a contiguous shard per server and crosses few links; the paper's "
    "figures are more traffic than its shards can send."
)
_LITTLE = "Most of what is remote is removed by substitution already; depth adds little to that."
_LOOK = "The myopic choice is already near what looking ahead finds."
_LOAD = "Answers of a length that the paper does not give; links of a cluster drawn in its ranges."
_DELAY = "delay_ms", "mb_per_1000_tokens"
CLAIMS = (
    Said(where="abstract, 4(a)", text="latency against EdgeShard", paper=-0.628,
         ours=less("delay_ms", "edgeshard"), why=_PLACEMENT),
    Said(where="4(a)", text="latency against MoE^2", paper=-0.396, ours=less("delay_ms", "moe2"),
         why="MoE^2 masks experts by the router's own order and pays in flips, see docs."),
    Said(where="4(a)", text="latency against Substitute-Only", paper=-0.245,
         ours=less("delay_ms", "substitute-only"), why=_LITTLE),
    Said(where="4(a)", text="latency of TrimMoE, ms", paper=142.0, ours=own("delay_ms"),
         kind="plain", why="The paper does not say whether per token or request, nor its links."),
    Said(where="4(b)", text="traffic, GB per 1,000 tokens", paper=1.05,
         ours=lambda facts: facts["trimmoe.mb_per_1000_tokens"] / 1e3, kind="plain",
         why="The paper's is more than dispatch and return of all layers can send."),
    Said(where="4(b)", text="traffic against EdgeShard", paper=-0.772,
         ours=less("mb_per_1000_tokens", "edgeshard"), why=_PLACEMENT),
    Said(where="4(b)", text="traffic against Substitute-Only", paper=-0.300,
         ours=less("mb_per_1000_tokens", "substitute-only"), why=_LITTLE),
    Said(where="4(c)", text="remote execution of TrimMoE", paper=0.16, ours=own("remote_share"),
         kind="share", why="How much is remote follows from the placement more than the policy."),
    Said(where="4(c)", text="remote execution of EdgeShard", paper=0.71, better="near",
         ours=own("remote_share", "edgeshard"), kind="share", why=_PLACEMENT),
    Said(where="4(c)", text="remote execution of Substitute-Only", paper=0.26, better="near",
         ours=own("remote_share", "substitute-only"), kind="share",
         why="It follows from memory and similarity, which the paper does not publish."),
    Said(where="4(d)", text="throughput over EdgeShard's", paper=2.35, kind="ratio", better="more",
         ours=lambda f: f["trimmoe.saturated_tokens_per_s"] / f["edgeshard.saturated_tokens_per_s"],
         why=_PLACEMENT),
    Said(where="4(d)", text="tokens per second", paper=1620.0, kind="plain", better="more",
         ours=own("saturated_tokens_per_s"), why=_LOAD),
    Said(where="5(a)", text="P99 of TrimMoE, ms", paper=268.0, ours=own("delay_p99_ms"),
         kind="plain", why=_LOAD),
    Said(where="5(a)", text="P99 against EdgeShard", paper=-0.640,
         ours=less("delay_p99_ms", "edgeshard"), why=_PLACEMENT),
    Said(where="5(a)", text="P99 against MoE^2", paper=-0.411, ours=less("delay_p99_ms", "moe2"),
         why="Without load hardly any token is worse than the mean: tails are the links'."),
    Said(where="5(b)", text="layers skipped", paper=0.11, ours=own("skipped"), kind="share",
         better="more", why="A skip needs a transmission to avoid and a loss it can afford."),
    Said(where="5(b)", text="layers after exits", paper=0.12, ours=own("exited"), kind="share",
         better="more", why="How sure tokens are before the last layers is the model's."),
    Said(where="6(a)", text="perplexity on WikiText-103, increase", paper=0.38, ours=None,
         kind="plain"),
    Said(where="6(a)", text="SQuAD F1, drop", paper=0.8, ours=None, kind="plain"),
    Said(where="6(a)", text="GSM8K accuracy, drop", paper=1.1, ours=None, kind="plain"),
    Said(where="6(a)", text="GSM8K accuracy, drop of MoD", paper=2.4, ours=None, kind="plain"),
    Said(where="6(b), Property 2", text="charged degradation within the budget of 2 %", paper=0.02,
         ours=own("charged_loss_per_token"), kind="share"),
    Said(where="7(a)", text="depth at which most exits are (20 to 22 of 32)", paper=0.66,
         better="near", ours=own("exit_peak"), kind="share",
         why="Where exits are follows from the model's confidence, or from the generator."),
    Said(where="7(b)", text="skips of the deeper half over the shallower, less 1", paper=0.0,
         ours=own("deeper_skips"), better="more",
         why="Skips go where importance is low: see below what it is assumed to do with depth."),
    Said(where="8", text="latency, H = 3 against H = 1", paper=-0.170,
         ours=less("delay_ms", "horizon-1", "horizon-3"), why=_LOOK),
    Said(where="8", text="traffic, H = 3 against H = 1", paper=-0.291,
         ours=less("mb_per_1000_tokens", "horizon-1", "horizon-3"), why=_LOOK),
    Said(where="9(a)", text="latency against MoE^2 on Switch-Base-8E", paper=-0.404, ours=None),
    Said(where="9(b)", text="quality retained, all three models", paper=0.992, ours=None,
         kind="share"),
    Said(where="10(a)", text="latency without skips (142 to 176 ms)", paper=0.239, better="more",
         ours=more_than_whole("no-skip", "delay_ms"), why=_LITTLE),
    *(Said(where="10", text=f"{what} without {part}: more than whole", paper=0.0, better="more",
           ours=more_than_whole(name, key), why="A part that is removed leaves its work to others.")
      for name, part in (("no-exit", "exits"), ("no-look-ahead", "look-ahead"),
                         ("no-redundancy", "redundancy"))
      for key, what in zip(_DELAY, ("latency", "traffic"), strict=True)),
    Said(where="11(b)", text="within 300 ms at 80 requests/s", paper=0.71, kind="share",
         better="more", ours=own("sla_share_at_80"), why=_LOAD),
    Said(where="11(b)", text="best baseline within 300 ms at 80 requests/s, below", paper=0.50,
         kind="share", ours=own("sla_share_at_80", "baselines"), why=_LOAD),
)  # fmt: skip


def borne_out(said: Said, ours: float) -> bool:
    """Whether a number of ours says what the paper's says."""
    if said.better == "near":
        return abs(ours - said.paper) <= 0.25 * abs(said.paper)
    return ours <= said.paper if said.better == "less" else ours >= said.paper
