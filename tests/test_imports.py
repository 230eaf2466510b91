"""Modules name one another in one direction only; import rules of packages are lint-imports'."""

from __future__ import annotations

from graphlib import TopologicalSorter

import grimp

ROOT = "trimmoe"
"""Offers the facade, and everybody knows its version."""


def test_no_modules_need_one_another_not_even_for_types() -> None:
    graph = grimp.build_graph(ROOT, cache_dir=None)
    named = {
        module: graph.find_modules_directly_imported_by(module) - {ROOT}
        for module in graph.modules - {ROOT}
    }
    assert len(named) > 400
    # Raises with the names of those that go round.
    TopologicalSorter(named).prepare()
