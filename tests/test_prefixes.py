"""Which kept sequence begins as another one does, and what counts as read whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from trimmoe.core.ledger import Kind, Ledger
from trimmoe.runtime import prefixes as prefixes_module
from trimmoe.runtime.prefixes import BLOCK, Found, Prefixes, is_exact

# Few tokens and blocks in common, so that many begin alike.
_PIECES = st.lists(st.integers(0, 1).map(lambda token: [token] * (BLOCK - 3)), max_size=6)
_TOKENS = st.tuples(_PIECES, st.lists(st.integers(0, 2), max_size=4)).map(
    lambda both: [token for piece in [*both[0], both[1]] for token in piece]
)
_REALMS = st.sampled_from([(0, 1), (1, 0)])


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


class Index(RuleBasedStateMachine):
    """An index beside a list of all that is in it, which is searched token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Prefixes()
        self.all: dict[int, tuple[tuple[int, int], list[int]]] = {}

    @rule(key=st.integers(0, 7), realm=_REALMS, tokens=_TOKENS)
    def keep(self, key: int, realm: tuple[int, int], tokens: list[int]) -> None:
        self.index.keep(key, realm, tokens)
        self.all.pop(key, None)
        self.all[key] = realm, tokens

    @rule(key=st.integers(0, 7))
    def drop(self, key: int) -> None:
        self.index.drop(key)
        self.all.pop(key, None)

    @rule(realm=_REALMS, tokens=_TOKENS)
    def find(self, realm: tuple[int, int], tokens: list[int]) -> None:
        alike = {
            key: common(kept, tokens) for key, (where, kept) in self.all.items() if where == realm
        }
        longest = max(alike.values(), default=0)
        found = self.index.find(realm, tokens)
        if longest < BLOCK:
            assert found is None
            return
        assert found is not None
        kept = self.all[found.key][1]
        assert found.length == alike[found.key] >= longest // BLOCK * BLOCK
        assert found.length == longest
        assert found.whole == (len(kept) - found.length < BLOCK)

    @invariant()
    def nothing_is_left_of_what_was_dropped(self) -> None:
        assert len(self.index) == len(self.all)
        assert all(key in self.index for key in self.all)


TestIndex = Index.TestCase


def test_of_those_that_are_alike_one_that_ends_there_comes_first_and_then_the_latest() -> None:
    index, shared = Prefixes(), list(range(2 * BLOCK))
    for key, more in enumerate((BLOCK, 0, BLOCK)):
        index.keep(key, (), shared + [99] * more)
    assert index.find((), [*shared, 7]) == Found(1, 2 * BLOCK, True)
    index.drop(1)
    assert index.find((), [*shared, 7]) == Found(2, 2 * BLOCK, False)


def test_hashes_that_collide_cost_time_and_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_alike(_: object, tokens: np.ndarray) -> list[int]:
        return [1] * (tokens.size // BLOCK)

    monkeypatch.setattr(prefixes_module, "_hashes", all_alike)
    index = Prefixes()
    index.keep(1, (), [5] * BLOCK)
    index.keep(2, (), [6] * BLOCK)
    assert index.find((), [5] * (BLOCK + 1)) == Found(1, BLOCK, True)
    assert index.find((), [7] * BLOCK) is None


def ledger(**changes: int) -> Ledger:
    empty = Ledger.empty(3, 2, 4)
    kinds = empty.kinds.copy()
    kinds[:, Kind.LOCAL_EXACT] = 1
    dropped = changes.pop("dropped", 0)
    for layer, kind in enumerate(changes.values()):
        kinds[layer] = 0
        kinds[layer, kind] = 1
    return replace(empty, tokens=1, kinds=kinds, slots_dropped=dropped)


@pytest.mark.parametrize(
    ("told", "exits", "exact"),
    [
        (ledger(), False, True),
        (ledger(a=Kind.REMOTE_EXACT), False, True),
        (ledger(a=Kind.REMOTE_EXACT, b=Kind.LOCAL_SUBSTITUTE), True, False),
        (ledger(a=Kind.REMOTE_SUBSTITUTE), True, False),
        (ledger(a=Kind.SKIPPED), True, False),
        (ledger(dropped=1), True, False),
        (ledger(a=Kind.EXITED), False, False),
        (ledger(a=Kind.EXITED), True, True),
    ],
)
def test_only_tokens_that_ran_whole_are_exact(told: Ledger, exits: bool, exact: bool) -> None:
    assert is_exact(told, exits=exits) is exact
