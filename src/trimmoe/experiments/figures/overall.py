"""Fig. 4: mean latency, traffic, remote ratio and throughput of everybody in every arena."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trimmoe.cost.clairvoyant import Exits, clairvoyant_bound
from trimmoe.experiments.figures.base import (
    Content,
    Grid,
    cell,
    change,
    figure_json,
    find,
    load_row,
    named,
    percent,
    share,
    table,
)
from trimmoe.experiments.figures.bench import BUDGET, CONFIDENCE, RATE_PER_S, SLA_S, Bench
from trimmoe.experiments.figures.contenders import ARENA_TITLES, ARENAS, Contender
from trimmoe.experiments.figures.draw import draw_bars
from trimmoe.experiments.figures.loads import SAVING_TOKENS, SETTLING_TOKENS
from trimmoe.policy.trim import TrimPolicy

CONCURRENCY = 240
"""The paper's throughput times its latency, 1620/s x 142 ms = 230 for TrimMoE and 690/s x 382 ms =
263 for EdgeShard, is how many tokens were in flight: by Little's law about 240."""

_PANELS = (
    ("delay_ms", "ms per token"),
    ("mb_per_1000_tokens", "MB per 1000 tokens"),
    ("remote_share", "remote share of executed layers"),
    ("saturated_tokens_per_s", f"tokens/s, {CONCURRENCY} at a time"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Overall:
    """Mean latency and traffic at 40 requests per second, throughput in a closed loop."""

    number: str = "4"
    title: str = "Overall performance"
    paper: str = (
        "Mixtral-8x7B at 40 requests/s: TrimMoE 142 ms, 62.8 % below EdgeShard, 39.6 % below "
        "MoE^2, 24.5 % below Substitute-Only; 1.05 GB per 1000 tokens; 16 % remote; 1620 tokens/s."
    )

    def measure(self, bench: Bench) -> Content:
        """Everybody under the same load, by arena."""
        arenas, left_out = {}, {}
        for name, contenders in ARENAS.items():
            kept, missing = bench.there(contenders())
            left_out |= missing
            arenas[name] = [named(one, _row(bench, one)) for one in kept]
        ours = next(one for one in ARENAS["pinned_best"]() if one.of == "trimmoe")
        exact = next(one for one in ARENAS["pinned_best"]() if one.of == "exact")
        body = {
            "rate_per_s": RATE_PER_S,
            "concurrency": CONCURRENCY,
            "arenas": arenas,
            "left_out": left_out,
            "unloaded": {
                "exact_ms": bench.replayed(exact).ledger.mean_delay_s * 1e3,
                "ours_ms": bench.replayed(ours).ledger.mean_delay_s * 1e3,
                "clairvoyant_ms": bound_s(bench, ours) * 1e3,
                "way_ms": way_s(bench, exact) * 1e3,
                "detour_share": detour_share(bench, ours),
            },
        }
        return figure_json(self, bench, body)

    def plot(self, content: Content, path: Path) -> None:
        """Four panels per arena."""
        arenas = {ARENA_TITLES[name]: rows for name, rows in content["arenas"].items()}
        draw_bars(path, _PANELS, arenas, size=(17, 2.7 * len(arenas)), named_once=True)

    def grids(self, content: Content) -> dict[str, Grid]:
        """One table per arena."""
        return {
            ARENA_TITLES[name]: table(_COLUMNS, rows) for name, rows in content["arenas"].items()
        }

    def findings(self, content: Content) -> list[str]:
        """Who is ahead by how much, and what is left to gain."""
        found = []
        for name, rows in content["arenas"].items():
            ours = find(rows, "trimmoe")
            assert ours is not None
            parts = [
                f"{percent(change(ours['delay_ms'], row['delay_ms']), signed=True)} against "
                f"{row['title']}"
                for row in rows
                if row is not ours
            ]
            found.append(f"{ARENA_TITLES[name]}: {', '.join(parts)} (mean latency).")
        rows = [row for rows in content["arenas"].values() for row in rows]
        found += [*full_sentence(rows), bound_sentence(content["unloaded"])]
        return [*found, *content["left_out"].values()]


def full_sentence(rows: list[Content]) -> list[str]:
    """Whose simulations did not fill from rest, if any did not."""
    titles = list(dict.fromkeys(row["title"] for row in rows if row["began_full"]))
    if not titles:
        return []
    return [
        "Simulations fill from rest for as long as an answer takes; slow ones begin with as many "
        f"answers under way as that leads to, {SETTLING_TOKENS} tokens of each before measuring "
        f"begins, {SAVING_TOKENS} with a budget. Here those of: {', '.join(titles)}."
    ]


def bound_sentence(unloaded: Content) -> str:
    """How much of exact execution on our plan could be saved at all, and what the rest is."""
    exact, ours = unloaded["exact_ms"], unloaded["ours_ms"]
    bound, way = unloaded["clairvoyant_ms"], unloaded["way_ms"]
    slower = ""
    if ours > exact * 1.001 and unloaded["detour_share"] > 0:
        slower = (
            f" Ours is slower than exact execution here: at {percent(unloaded['detour_share'])} of "
            "the exit points along its routes the link straight back is slower than going on, and "
            "an exit that is due is taken all the same (see `without exits` in Fig. 10)."
        )
    return (
        f"On our plan exact execution takes {exact:.2f} ms per token without load, "
        f"{way:.2f} ms of it on the way along the route and in attention, which no skip, drop or "
        f"substitute shortens. Ours takes {ours:.2f} ms; knowing every token's future, the same "
        f"actions at the same budget could not go below {bound:.2f} ms "
        f"({percent(change(bound, exact), signed=True)}).{slower}"
    )


def _row(bench: Bench, one) -> Content:
    row = load_row(bench.simulated(one), SLA_S, bench.effort.output_tokens)
    full = load_row(bench.saturated(one, CONCURRENCY), SLA_S, bench.effort.output_tokens)
    return row | {
        "began_full": (one.key, RATE_PER_S) in bench.began_full,
        "unloaded_ms": bench.replayed(one).ledger.mean_delay_s * 1e3,
        "saturated_tokens_per_s": full["tokens_per_s"],
        "saturated_server_use_max": full["server_use_max"],
    }


_COLUMNS = (
    ("method", cell("title")),
    ("ms", cell("delay_ms", ".2f")),
    ("±", cell("delay_half_width_ms", ".2f")),
    ("P99", cell("delay_p99_ms", ".1f")),
    ("MB/1000", cell("mb_per_1000_tokens", ".2f")),
    ("remote", share("remote_share")),
    ("hops", cell("hops_per_token", ".2f")),
    ("charged", cell("charged_loss_per_token", ".4f")),
    ("tokens/s", cell("saturated_tokens_per_s", ".0f")),
)


def bound_s(bench: Bench, contender: Contender) -> float:
    """Mean delay per token that no policy with the contender's actions could go below."""
    rig = bench.rig(contender)
    assert isinstance(rig.engine.policy, TrimPolicy)
    bench.announce(f"{contender.title}: clairvoyant")
    needed, charge = rig.engine.exit_terms(CONFIDENCE)
    return clairvoyant_bound(
        rig.engine.policy.lookahead.space,
        bench.world.trace,
        rig.engine.routes,
        bench.access,
        budget=BUDGET,
        exits=Exits(threshold=needed, loss=charge),
    ).delay_s


def way_s(bench: Bench, contender: Contender) -> float:
    """Mean time per token that full depth spends on the way along its route and in attention,
    which skips, drops and substitutes leave as it is; only exits shorten it."""
    rig = bench.rig(contender)
    cost, routes = rig.engine.cost, rig.engine.routes
    hops = cost.transfer_s[routes[:, :-1], routes[:, 1:]].sum(1)
    dense = cost.dense_s[routes, np.arange(cost.layer_count)].sum(1)
    return float((hops + dense + cost.ends_s(routes))[bench.access].mean())


def detour_share(bench: Bench, contender: Contender) -> float:
    """Share of the exit points along its route, averaged over the users' routes, at which the
    link straight back is slower than hops and attention of all that is left of the route."""
    cost, routes = bench.rig(contender).engine.cost, bench.rig(contender).engine.routes
    servers, layers = np.arange(cost.server_count), np.arange(1, cost.layer_count)
    straight = cost.token_transfer_s[routes[:, 1:], servers[:, None]]
    hops = np.zeros((servers.size, layers.size))
    hops[:, :-1] = cost.transfer_s[routes[:, 1:-1], routes[:, 2:]]
    left = hops + cost.dense_s[routes[:, 1:], layers]
    on = np.cumsum(left[:, ::-1], axis=1)[:, ::-1] + straight[:, -1:]
    slower = (straight > on).mean(1) if layers.size else np.zeros(servers.size)
    return float(bench.world.plan.cluster.access_share @ slower)
