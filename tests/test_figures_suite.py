"""The paper's figures on a tiny world: complete, repeatable, honest about what was measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimmoe.core.errors import UserError
from trimmoe.experiments.figures.base import CLOCK, Content
from trimmoe.experiments.figures.bench import Bench
from trimmoe.experiments.figures.claims import CLAIMS, COLUMNS, claim_rows, missed, shown
from trimmoe.experiments.figures.contenders import everybody
from trimmoe.experiments.figures.overall import detour_share
from trimmoe.experiments.figures.report import write_report
from trimmoe.experiments.figures.suite import FIGURES, find_figures, run_figures, stem
from trimmoe.experiments.figures.world import World, first_tokens, made_world, quick
from trimmoe.simulator.probabilities import complete_probabilities
from worlds import small_world

Contents = dict[str, dict[str, Any]]
PNG = b"\x89PNG"


def tiny_world(*, whole: bool = True) -> World:
    """Three servers, five layers; `whole`: the trace holds the routers' whole output."""
    made = small_world(3, servers=3, sequences=6, length=6)
    experts, masses = made.trace.experts, made.trace.masses
    probabilities = complete_probabilities(np.random.default_rng(0), experts, masses, 5)
    hashes = {"model": made.model.model_hash, "profile": made.profile.hash}
    trace = replace(
        made.trace,
        header=replace(made.trace.header, input_hashes=hashes),
        probabilities=probabilities if whole else None,
    )
    cluster = made.plan.cluster
    return made_world(
        "tiny", "generated", made.model, made.profile, trace, cluster, quick(), seed=0
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("figures")


@pytest.fixture(scope="module")
def contents(folder: Path) -> Contents:
    return run_figures(Bench(world=tiny_world(), effort=quick()), (), folder)


def numbers(value: Any) -> Iterator[float]:
    """All numbers of a JSON."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, int | float):
        yield value


def rows_of(content: dict[str, Any]) -> list[dict[str, Any]]:
    """All rows of a figure with what was done to the layers."""
    found, pending = [], [content]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if "kinds" in value:
                found.append(value)
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return found


def test_every_figure_is_written_whole(contents: Contents, folder: Path) -> None:
    assert set(contents) == set(FIGURES) == {*map(str, range(4, 12)), "E", "S"}
    for number, content in contents.items():
        written = json.loads((folder / f"{stem(number)}.json").read_text())
        assert written == json.loads(json.dumps(content)), number
        assert all(np.isfinite(value) for value in numbers(content)), number
        assert (folder / f"{stem(number)}.png").read_bytes().startswith(PNG)
        assert {"settings", "seed", "trimmoe_version", "world"} <= content.keys()
        assert {"model", "profile", "trace", "plan", "paper_plan"} == set(
            content["world"]["inputs"]
        )


def test_shares_of_layer_executions_sum_to_one_and_rates_are_rates(contents: Contents) -> None:
    for number in ("4", "5", "6", "8", "9", "10", "11", "E"):
        rows = rows_of(contents[number])
        assert rows, number
        for row in rows:
            assert sum(row["kinds"].values()) == pytest.approx(1.0)
            assert 0.0 <= row["remote_share"] <= 1.0
            assert row["delay_ms"] > 0
            assert row["mb_per_1000_tokens"] >= 0
    for row in contents["7"]["rows"]:
        assert sum(row["exit_share"]) == pytest.approx(1.0)
        assert all(0.0 <= ratio <= 1.0 for ratio in row["skip_ratio"])


def test_every_contender_runs_where_the_world_allows_it(contents: Contents) -> None:
    ran = {row["key"] for rows in contents["4"]["arenas"].values() for row in rows}
    wanted = {contender.key for contender in everybody()}
    assert ran | set(contents["4"]["left_out"]) == wanted
    assert {"letter/moe2", "moving/moe2", "pinned/local-prior", "pinned/trimmoe"} <= ran


def test_exact_methods_charge_nothing_and_ours_stays_within_every_budget(
    contents: Contents,
) -> None:
    lossless = [row for row in contents["4"]["arenas"]["pinned_best"] if row["of"] == "exact"]
    assert [row["charged_loss_per_token"] for row in lossless] == [0.0]
    for row in contents["6"]["sweep"]:
        assert row["charged_loss_per_token"] <= row["budget"] + 1e-12


def test_nobody_beats_the_clairvoyant_and_the_way_is_part_of_exact_execution(
    contents: Contents,
) -> None:
    unloaded = contents["4"]["unloaded"]
    assert unloaded["clairvoyant_ms"] <= unloaded["ours_ms"] + 1e-9
    assert 0.0 <= unloaded["way_ms"] <= unloaded["exact_ms"] + 1e-9


def test_every_world_names_what_others_run_without_loss_and_our_own(contents: Contents) -> None:
    for world in contents["9"]["worlds"].values():
        whose = {row["of"] for row in world["arenas"]["pinned_best"] if row["lossless"]}
        assert "exact" in whose
        assert whose - {"exact"}
    text = next(t for t in FIGURES["9"].findings(contents["9"]) if "tiny, pinned" in t)
    assert "against exact execution on our plan" in text


def test_more_allowed_loss_never_makes_the_best_point_within_it_slower(contents: Contents) -> None:
    at = contents["E"]["at_equal_charge"]
    assert "TrimMoE" in at
    for levels in at.values():
        delays = [levels[level] for level in ("0.005", "0.01", "0.02")]
        assert delays == sorted(delays, reverse=True)


def test_nothing_is_called_measured_where_nothing_was_executed(contents: Contents) -> None:
    assert contents["6"]["executed"] is None
    assert contents["E"]["executed"] is None
    sentences = FIGURES["6"].findings(contents["6"])
    assert any("Nothing was executed" in sentence for sentence in sentences)
    assert any("is not judged" in sentence for sentence in missed(claim_rows(contents), contents))
    assert all("flip_rate" not in row for row in rows_of(contents["6"]))


def but_for_the_clock(content: Content) -> str:
    """What two runs of a figure have in common."""
    return json.dumps({name: value for name, value in content.items() if name != CLOCK})


def test_same_seed_same_json_but_for_the_clock(contents: Contents, tmp_path: Path) -> None:
    again = run_figures(Bench(world=tiny_world(), effort=quick()), ("4", "8", "11"), tmp_path)
    for number, content in again.items():
        assert but_for_the_clock(content) == but_for_the_clock(contents[number]), number


def test_another_seed_draws_other_arrivals(contents: Contents, tmp_path: Path) -> None:
    bench = Bench(world=tiny_world(), effort=quick(), seed=5)
    other = run_figures(bench, ("11",), tmp_path)["11"]
    delays = [row["delay_ms"] for row in other["rows"]]
    assert delays != [row["delay_ms"] for row in contents["11"]["rows"]]


def test_the_report_holds_every_figure_and_every_claim_with_both_numbers(
    contents: Contents, folder: Path
) -> None:
    markdown, page = write_report(contents, folder)
    text, html = markdown.read_text(), page.read_text()
    for figure in FIGURES.values():
        assert figure.title in text
        assert f"({stem(figure.number)}.png)" in text
    assert html.count("data:image/png;base64,") == len(FIGURES)
    assert 'src="http' not in html
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines()}
    for row in claim_rows(contents):
        line = lines[row["claim"]]
        if row["paper"] is not None:
            assert shown(row["paper"], kind=row["kind"]) in line
        for value in row["ours"].values():
            assert shown(value, kind=row["kind"]) in line


def test_every_claim_has_a_number_of_ours_and_a_missed_margin_is_named(contents: Contents) -> None:
    rows, sentences = claim_rows(contents), missed(claim_rows(contents), contents)
    assert len(rows) == len(CLAIMS)
    for row in rows:
        known = [value for value in row["ours"].values() if value is not None]
        if "H = 3" not in row["claim"]:  # The quick effort looks ahead two layers at most.
            assert known, row["claim"]
        for column in COLUMNS:
            said = any(row["claim"] in text and COLUMNS[column] in text for text in sentences)
            assert said == (row["reached"][column] is False)


def test_without_the_routers_output_those_who_need_it_are_left_out_and_said_so(
    tmp_path: Path,
) -> None:
    bench = Bench(world=tiny_world(whole=False), effort=quick())
    content = run_figures(bench, ("11",), tmp_path)["11"]
    assert set(content["left_out"]) == {"letter/moe2"}
    assert "record it anew" in content["left_out"]["letter/moe2"]
    assert "letter/moe2" not in {row["key"] for row in content["rows"]}


def test_a_measured_quality_comes_from_what_was_executed_only(tmp_path: Path) -> None:
    executed = []

    def execute(rig) -> dict[str, float]:
        executed.append(rig.contender.key)
        flips = 0.0 if rig.settings.levers.lossless and rig.contender.of == "exact" else 0.017
        return {
            "tokens": 100,
            "delay_ms": 1.0,
            "mb_per_1000_tokens": 1.0,
            "charged_loss_per_token": 0.5,
            "flip_rate": flips,
            "flip_rate_low_95": 0.0,
            "flip_rate_high_95": 0.05,
            "perplexity": 3.0,
            "exact_perplexity": 2.9,
        }

    bench = Bench(world=tiny_world(), effort=quick(), execute=execute)
    content = run_figures(bench, ("6", "E"), tmp_path)
    assert "pinned/trimmoe" in executed
    assert [row["flip_rate"] for row in content["6"]["executed"]["sweep"]] == [0.017] * 3
    assert any("+0.100" in text for text in FIGURES["6"].findings(content["6"]))
    assert content["E"]["executed"]["at_equal_flips"]["TrimMoE"]["0.02"] == 1.0
    assert {"pinned/pipeline", "pinned/exact", "pinned/load-balanced"} <= set(executed)
    assert any("is not shown" in text for text in content["E"]["goal"])


def test_unknown_figures_are_refused_by_name() -> None:
    with pytest.raises(UserError, match="no figure 12; choose from 4, 5"):
        find_figures(["12"])


def test_a_shortened_trace_keeps_the_beginnings_of_its_sequences() -> None:
    trace = tiny_world().trace
    short = first_tokens(trace, 12)
    assert (short.sequence_count, short.length) == (6, 2)
    np.testing.assert_array_equal(short.experts[2:4], trace.experts[6:8])
    assert first_tokens(trace, 10**6).token_count == trace.token_count


def test_sequences_enter_as_users_do_as_nearly_as_whole_sequences_allow() -> None:
    world = tiny_world()
    for count in (1, 7, 100):
        entered = np.bincount(world.access(count, 3), minlength=3)
        assert entered.sum() == count
        assert (np.abs(entered - world.plan.cluster.access_share * count) < 1.0 + 1e-9).all()
    assert (world.access(100, 3) != world.access(100, 4)).any()


def test_a_straight_link_back_that_is_slower_than_the_route_is_a_detour() -> None:
    world = tiny_world()
    bench = Bench(world=world, effort=quick())
    ours = next(one for one in everybody() if one.key == "pinned/trimmoe")
    cost, routes = bench.rig(ours).engine.cost, bench.rig(ours).engine.routes
    share, layers = world.plan.cluster.access_share, cost.layer_count
    expected = 0.0
    for access, route in enumerate(routes.tolist()):
        slower = 0
        for layer in range(1, layers):  # An exit before this layer leaves from its server.
            on = sum(cost.dense_s[route[at], at] for at in range(layer, layers))
            on += sum(cost.transfer_s[route[at], route[at + 1]] for at in range(layer, layers - 1))
            on += cost.token_transfer_s[route[-1], access]
            slower += cost.token_transfer_s[route[layer], access] > on
        expected += share[access] * slower / (layers - 1)
    assert detour_share(bench, ours) == pytest.approx(expected)
