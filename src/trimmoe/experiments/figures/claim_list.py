"""What the paper's abstract, section VI and figures 4 to 11 say in numbers, and what ours are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from trimmoe.experiments.figures.models import MODELS

Facts = Mapping[str, float]
"""One world's measurements in one column: `method.figure`, such as `edgeshard.delay_ms`."""
Value = Callable[[Facts], float]
"""From facts to the claim's number; raises `KeyError` where one of them is missing."""
Better = Literal["less", "more", "near"]
BASELINES = ("edgeshard", "slimcaching", "moe2", "mod", "substitute-only")
"""The paper's five."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Said:
    """One number of the paper's."""

    where: str
    text: str
    paper: float
    ours: Value | None
    """None: nothing here measures it, for the reason in `why`."""
    kind: Literal["change", "share", "ratio", "plain"] = "change"
    better: Better = "less"
    """Which side of the paper's number still bears the claim out; `near`: within a quarter."""
    said: str = ""
    """The paper's words, where a number alone would not say them."""
    why: str = ""
    """One sentence for where ours differs."""


def less(key: str, of: str, mine: str = "trimmoe") -> Value:
    """The relative change of a figure from another method's to ours."""
    return lambda facts: facts[f"{mine}.{key}"] / facts[f"{of}.{key}"] - 1.0


def own(key: str, of: str = "trimmoe") -> Value:
    """A figure itself."""
    return lambda facts: facts[f"{of}.{key}"]


def over(key: str, of: str, mine: str = "trimmoe") -> Value:
    """One method's figure over another's."""
    return lambda facts: facts[f"{mine}.{key}"] / facts[f"{of}.{key}"]


def more_than_whole(variant: str, key: str) -> Value:
    """What an ablation adds to the whole."""
    return less(key, "whole", variant)


def saved_ms(facts: Facts, geometry: str) -> float:
    """Latency per token that ours takes off MoE^2's on a model, ms."""
    return facts[f"{geometry}.moe2.delay_ms"] - facts[f"{geometry}.trimmoe.delay_ms"]


def against_fastest(facts: Facts) -> float:
    """The relative change of latency from the fastest baseline's to ours, of those there are."""
    there = [facts[key] for name in BASELINES if (key := f"{name}.delay_ms") in facts]
    return facts["trimmoe.delay_ms"] / min(there) - 1.0


def next_ablation_ms(facts: Facts) -> float:
    """Latency without skips less that without any other part, whichever takes longest, ms."""
    others = max(facts[f"{name}.delay_ms"] for name, *_ in _WITHOUT)
    return facts["no-skip.delay_ms"] - others


def retained(facts: Facts) -> float:
    """Predictions that stay, by what calibration charges, on the model where it is the fewest."""
    return 1.0 - max(facts[f"{model}.trimmoe.charged_loss_per_token"] for model in MODELS)


_PLACEMENT = (
    "EdgeShard's placement is a contiguous shard per server and crosses few links; the paper's "
    "figures are more traffic than its shards can send."
)
_INHERITED = "On our plan MoE^2 inherits our placement, and is charged flips for what it masks."
_EXITS = (
    "What depth saves is what exits leave out: much of generated tokens, little of the embedded "
    "model, and on our plan mostly local layers."
)
_SAME_WAY = (
    "MoD skips layers wherever they run, MoE^2 masks experts that are far: which takes longer "
    "hangs on how much each is let to change."
)
_BUYS = "On our plan hardly anything is worth spending on; by the letter exits are free."
_SPENT = "What skips do not spend, substitutes do."
_IN_VAIN = "Drafts that are wrong send in vain."
_LOOK = "The myopic choice is already near what looking ahead finds."
_FARTHER = "Every layer more that is seen is worth less than the one before."
_KNEE = "By the letter what a budget buys still grows there."
_FASTEST = "EdgeShard crosses few links: by the letter nobody is faster."
_LOAD = "What a request is, and how many tokens it has, the paper does not say."
_FEW = "A skip needs a transmission to avoid and a loss it can afford: few layers are skipped."
_ONE = (
    "(10) runs one of the experts that this model activates and charges nothing for the others: "
    "see the row where all of them run."
)
_CLUSTERS = "It differs more between clusters than between the two."
_MET = "EdgeShard crosses few links and mostly meets it; on our plan others do too."
_EVALUATE = "`trimmoe evaluate` measures it, see docs/experiments.md for the embedded model."
_SOLVES = "The embedded model solves none of it; `trimmoe evaluate` measures it on larger ones."
_SEEN = -0.001
"""A fall of which the paper says no size; less is none."""
_FLAT = -0.02
"""What is left to fall where the paper's curve is flat; more is not."""
_SMALL, _MIDDLE, _LARGE = MODELS
_WITHOUT = (
    ("no-exit", "exits", _IN_VAIN),
    ("no-look-ahead", "look-ahead", _LOOK),
    ("no-redundancy", "redundancy", _CLUSTERS),
)
_MEASURES = (("delay_ms", "latency"), ("mb_per_1000_tokens", "traffic"))
CLAIMS = (
    Said(where="abstract, 4(a)", text="latency against EdgeShard", paper=-0.628,
         ours=less("delay_ms", "edgeshard"), why=_PLACEMENT),
    Said(where="4(a)", text="latency against MoE^2", paper=-0.396, ours=less("delay_ms", "moe2"),
         why=_INHERITED),
    Said(where="4(a)", text="latency against Substitute-Only", paper=-0.245,
         ours=less("delay_ms", "substitute-only"), why=_EXITS),
    Said(where="4(a)", text="latency against the fastest baseline", paper=0.0,
         said="lowest", ours=against_fastest, why=_FASTEST),
    Said(where="4(a)", text="latency of MoD against EdgeShard", paper=0.0, said="lower",
         ours=less("delay_ms", "edgeshard", "mod"), why=_PLACEMENT),
    Said(where="4(a)", text="latency of MoD against MoE^2", paper=0.0, said="higher",
         better="more", ours=less("delay_ms", "moe2", "mod"), why=_SAME_WAY),
    Said(where="4(a)", text="latency of a request, ms", paper=142.0, ours=own("request_ms"),
         kind="plain", why=_LOAD),
    Said(where="4(b)", text="traffic, GB per 1,000 tokens", paper=1.05,
         ours=lambda facts: facts["trimmoe.mb_per_1000_tokens"] / 1e3, kind="plain",
         why="The paper's is more than dispatch and return of all layers can send."),
    Said(where="4(b)", text="traffic against EdgeShard", paper=-0.772,
         ours=less("mb_per_1000_tokens", "edgeshard"), why=_PLACEMENT),
    Said(where="4(b)", text="traffic against Substitute-Only", paper=-0.300,
         ours=less("mb_per_1000_tokens", "substitute-only"), why=f"{_EXITS} {_IN_VAIN}"),
    Said(where="4(c)", text="remote execution of TrimMoE", paper=0.16, ours=own("remote_share"),
         kind="share", why="How much is remote follows from the placement more than the policy."),
    Said(where="4(c)", text="remote execution of EdgeShard", paper=0.71, better="near",
         ours=own("remote_share", "edgeshard"), kind="share", why=_PLACEMENT),
    Said(where="4(c)", text="remote execution of Substitute-Only", paper=0.26, better="near",
         ours=own("remote_share", "substitute-only"), kind="share",
         why="How much is remote follows from the placement, which the paper does not publish."),
    Said(where="4(d)", text="throughput over EdgeShard's", paper=2.35, kind="ratio", better="more",
         ours=over("saturated_tokens_per_s", "edgeshard"), why=_PLACEMENT),
    Said(where="4(d)", text="tokens per second", paper=1620.0, kind="plain", better="more",
         ours=own("saturated_tokens_per_s"), why=_LOAD),
    Said(where="5(a)", text="P99 of requests, ms", paper=268.0, ours=own("request_p99_ms"),
         kind="plain", why=_LOAD),
    Said(where="5(a)", text="P99 of requests against EdgeShard", paper=-0.640,
         ours=less("request_p99_ms", "edgeshard"), why=_PLACEMENT),
    Said(where="5(a)", text="P99 of requests against MoE^2", paper=-0.411,
         ours=less("request_p99_ms", "moe2"),
         why=_INHERITED),
    Said(where="5(b)", text="layers skipped", paper=0.11, ours=own("skipped"), kind="share",
         better="more", why=_FEW),
    Said(where="5(b)", text="layers after exits", paper=0.12, ours=own("exited"), kind="share",
         better="more", why="How sure tokens are before the last layers is the model's."),
    Said(where="5(b)", text="layers removed, skipped or after exits", paper=0.23, kind="share",
         better="more", ours=lambda facts: facts["trimmoe.skipped"] + facts["trimmoe.exited"],
         why=_FEW),
    Said(where="6(a)", text="perplexity, increase (paper: WikiText-103)", paper=0.38,
         ours=own("perplexity_rise"), kind="plain", why=_ONE),
    Said(where="6(a)", text="quality that MoD loses and TrimMoE does not, here share of flips",
         paper=0.0, said="GSM8K 2.4 and 1.1", kind="share", better="more",
         ours=lambda facts: facts["mod.flip_rate"] - facts["trimmoe.flip_rate"], why=_ONE),
    Said(where="6(a)", text="SQuAD F1, drop", paper=0.8, ours=None, kind="plain",
         why=_EVALUATE),
    Said(where="6(a)", text="GSM8K accuracy, drop", paper=1.1, ours=None, kind="plain",
         why=_SOLVES),
    Said(where="6(b), Property 2", text="charged degradation within the budget of 2 %", paper=0.02,
         ours=own("charged_loss_per_token"), kind="share"),
    Said(where="6(b)", text="largest share of a budget of 0.5 to 3 % that is charged", paper=1.0,
         said="below 1", ours=own("used", "budgets"), kind="share"),
    Said(where="6(b)", text="latency, budget of 2 % against 0.5 %", paper=_SEEN, said="falls",
         ours=less("delay_ms", "budget-0.005", "budget-0.02"), why=_BUYS),
    Said(where="6(b)", text="latency, budget of 3 % against 2 %", paper=_FLAT,
         said="a knee: flat", better="more", ours=less("delay_ms", "budget-0.02", "budget-0.03"),
         why=_KNEE),
    Said(where="6(b)", text="measured degradation within the budget of 2 %", paper=0.02,
         ours=own("flip_rate"), kind="share", why=_ONE),
    Said(where="6(b)", text="the same, were all activated experts run and not one (10)",
         paper=0.02, ours=own("flip_rate", "all-experts"), kind="share",
         why="Exits are free by the letter, and what is trimmed flips later tokens too."),
    Said(where="7(a)", text="depth at which most exits are (20 to 22 of 32)", paper=0.66,
         better="near", ours=own("exit_peak"), kind="share",
         why="Where exits are follows from the model's confidence, or from the generator."),
    Said(where="7(b)", text="skips of the deeper half over the shallower, less 1", paper=0.0,
         ours=own("deeper_skips"), better="more", said="rises",
         why="Skips go where importance is low: see below what it is assumed to do with depth."),
    Said(where="8", text="latency, H = 3 against H = 1", paper=-0.170,
         ours=less("delay_ms", "horizon-1", "horizon-3"), why=_LOOK),
    Said(where="8", text="traffic, H = 3 against H = 1", paper=-0.291,
         ours=less("mb_per_1000_tokens", "horizon-1", "horizon-3"), why=_LOOK),
    Said(where="8", text="latency, H = 5 against H = 3", paper=_FLAT, said="flat", better="more",
         ours=less("delay_ms", "horizon-3", "horizon-5"), why=_FARTHER),
    Said(where="8", text="traffic, H = 5 against H = 3", paper=_FLAT, said="flat", better="more",
         ours=less("mb_per_1000_tokens", "horizon-3", "horizon-5"), why=_FARTHER),
    Said(where="9(a)", text="latency against MoE^2 on Switch-Base-8E", paper=-0.404,
         ours=less("delay_ms", f"{_SMALL}.moe2", f"{_SMALL}.trimmoe"),
         why=_INHERITED),
    Said(where="9(a)", text="latency against MoE^2 on Qwen-MoE-A2.7B", paper=0.0, said="lower",
         ours=less("delay_ms", f"{_MIDDLE}.moe2", f"{_MIDDLE}.trimmoe"), why=_INHERITED),
    Said(where="9(a)", text="saving against MoE^2 on Mixtral over Switch-Base-8E's, ms less ms",
         paper=0.0, said="21 to 93 ms", kind="plain", better="more",
         ours=lambda facts: saved_ms(facts, _LARGE) - saved_ms(facts, _SMALL),
         why="On our plan there is little saving that could grow."),
    Said(where="9(b)", text="quality retained as charged, least of all three models", paper=0.992,
         ours=retained, kind="share", better="more",
         why="The budget is 2 %, and more than 0.8 % of it is spent."),
    Said(where="9(b)", text="quality retained as measured", paper=0.992, better="more",
         ours=lambda facts: 1.0 - facts["trimmoe.flip_rate"], kind="share", why=_ONE),
    Said(where="10(a)", text="latency without skips (142 to 176 ms)", paper=0.239, better="more",
         ours=more_than_whole("no-skip", "delay_ms"), why=_FEW),
    Said(where="10(a)", text="latency without skips less that without any other part, ms",
         paper=0.0, said="largest", kind="plain", better="more", ours=next_ablation_ms, why=_FEW),
    Said(where="10(c)", text="charged degradation without skips against whole", paper=_SEEN,
         said="lower", ours=less("charged_loss_per_token", "whole", "no-skip"), why=_SPENT),
    *(Said(where="10", text=f"{what} without {part}: more than whole", paper=0.0, better="more",
           said="more", ours=more_than_whole(name, key), why=why)
      for name, part, why in _WITHOUT for key, what in _MEASURES),
    Said(where="11(a)", text="growth of latency, 10 to 80 requests/s, less the slowest baseline's",
         paper=0.0, said="slowest", ours=lambda f: f["trimmoe.growth"] - f["baselines.growth"],
         why="Links and servers of the paper's ranges hardly queue at these rates."),
    Said(where="11(b)", text="requests within 300 ms at 80 requests/s", paper=0.71, kind="share",
         better="more", ours=own("sla_share_at_80"), why=_LOAD),
    Said(where="11(b)", text="best baseline's requests within 300 ms at 80 requests/s, below",
         paper=0.50, kind="share", ours=own("sla_share_at_80", "baselines"), why=_MET),
    Said(where="11(b)", text="the same, were a request one token: TrimMoE", paper=0.71,
         kind="share", better="more", ours=own("token_sla_share_at_80"), why=_LOAD),
    Said(where="11(b)", text="the same, were a request one token: best baseline, below",
         paper=0.50, kind="share", ours=own("token_sla_share_at_80", "baselines"), why=_MET),
)  # fmt: skip
