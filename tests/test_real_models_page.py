"""Every figure of the tables in docs/real-models.md is what the command beside it says today."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from published import PUBLISHED, sizes_of
from trimmoe.core.cluster_file import load_cluster
from trimmoe.core.precision import Precision
from trimmoe.experiments.dry_run import RESERVED_TOKENS
from trimmoe.experiments.expectation import LAYER_S, READ_SHARE, expected_decoding, read_speeds
from trimmoe.placement.capacity import human_bytes
from trimmoe.placement.dry_run import dry_run

PAGE = (Path(__file__).parent.parent / "docs" / "real-models.md").read_text(encoding="utf-8")
CLUSTERS = ("gaming3", "mini3", "edge10")
NO_FIT = "does not fit"


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    cluster: str
    model: str
    precision: Precision
    cells: tuple[str, ...]


def cells(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip().strip("|").split("|"))


def rows(heading: str) -> list[tuple[str, ...]]:
    """The table's lines in the section of that heading."""
    section = re.search(rf"^## {heading}$(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    assert section is not None, heading
    lines = [cells(line) for line in section[1].splitlines() if line.startswith("|")]
    return [line for line in lines if line[0] in PUBLISHED]


def expected_rows() -> list[Row]:
    """Those of the sections that name a cluster in their command."""
    found: list[Row] = []
    for section in re.split(r"^## ", PAGE, flags=re.M)[1:]:
        command = re.search(r"--config \S+ (\w+)( --quantise (\w+))?$", section, re.M)
        if command is None or command[1] not in CLUSTERS:
            continue
        precision = Precision(command[3] or "none")
        for line in rows(re.escape(section.splitlines()[0])):
            found.append(
                Row(cluster=command[1], model=line[0], precision=precision, cells=line[1:])
            )
    return found


ROWS = expected_rows()


def test_the_page_has_a_section_for_each_kind_of_user() -> None:
    assert {row.cluster for row in ROWS} == set(CLUSTERS)
    assert all(any(cell != NO_FIT for cell in row.cells) for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.cluster}-{row.model}")
def test_what_fits_and_what_to_expect(row: Row) -> None:
    sizes, cluster = sizes_of(row.model, row.precision), load_cluster(Path(row.cluster))
    held = sizes.spec.dense_bytes + sizes.spec.total_expert_bytes
    reserve = sizes.cache_bytes(RESERVED_TOKENS)
    fit = dry_run(cluster, sizes.spec, kv_reserve_bytes=reserve)
    assert row.cells[0] == human_bytes(held)
    if fit.refusal is not None:
        assert row.cells[1:] == (NO_FIT, "-")
        return
    found = expected_decoding(
        cluster,
        sizes.spec,
        bytes_per_parameter=held / sizes.parameters,
        kv_reserve_bytes=reserve,
    )
    assert row.cells[1] == f"{fit.copies:.2f}"
    # Drawn routing may differ in the last bits between versions of numpy.
    assert float(row.cells[2]) == pytest.approx(found.tokens_per_s, rel=0.02, abs=0.06)


def test_what_published_models_take() -> None:
    table = rows("What published models take")
    assert [line[0] for line in table] == list(PUBLISHED)
    for line in table:
        sizes, small = (sizes_of(line[0], p) for p in (Precision.NONE, Precision.INT4))
        held = [each.spec.dense_bytes + each.spec.total_expert_bytes for each in (sizes, small)]
        assert line[1:] == (
            f"{sizes.parameters / 1e9:.2f}",
            f"{sizes.active_parameters / 1e9:.2f}",
            f"{human_bytes(sizes.stored_bytes)}, {sizes.stored_as}",
            *map(human_bytes, held),
            human_bytes(sizes.cache_bytes(RESERVED_TOKENS)),
        )


def test_a_server_is_as_fast_as_its_slower_part() -> None:
    sizes, cluster = sizes_of("OLMoE", Precision.NONE), load_cluster(Path("mini3"))
    speeds = read_speeds(cluster, sizes.spec, 2.0)
    expert = 3 * 2048 * 1024 * 2
    assert speeds.expert_s[0] == pytest.approx(expert / (READ_SHARE * 89.6e9))
    assert speeds.dense_s[0] > LAYER_S
    slow = load_cluster(Path("mini3"))
    slow.flops_per_s[:] = 1e9  # 12.6 million FLOPs of an expert take longer than its bytes
    assert read_speeds(slow, sizes.spec, 2.0).expert_s[0] == pytest.approx(expert / 1e9)
